"""A ModelConfig survives JSON exactly; a damaged one is refused by key."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.models.checkpoints.config_json import config_from_json, config_to_json
from jaxkv.models.config import (
    AttentionConfig,
    LayerConfig,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
    YarnScaling,
)
from jaxkv.models.errors import ModelError

CONFIG = ModelConfig(
    family="gemma3",
    vocab_size=40,
    width=96,
    mlp_width=160,
    layers=(
        LayerConfig(window=24, rope=RopeConfig(theta=1e4)),
        LayerConfig(window=None, rope=RopeConfig(theta=1e6, scaling=LinearScaling(factor=8.0))),
    ),
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=24, scale=24**-0.5),
    max_positions=512,
    rms_eps=1e-6,
    activation="gelu_tanh",
    embedding_scale=math.sqrt(96),
    logit_soft_cap=30.0,
)

positive = st.floats(1e-6, 1e6)
counts = st.integers(1, 1 << 40)
scalings = st.one_of(
    st.none(),
    st.builds(LinearScaling, factor=positive),
    st.builds(
        Llama3Scaling,
        factor=positive,
        low_freq_factor=positive,
        high_freq_factor=positive,
        original_max_positions=counts,
    ),
    st.builds(
        YarnScaling,
        factor=positive,
        original_max_positions=counts,
        attention_factor=positive,
        beta_fast=positive,
        truncate=st.booleans(),
    ),
)
layers = st.builds(
    LayerConfig,
    window=st.none() | counts,
    rope=st.builds(RopeConfig, theta=positive, scaling=scalings),
)
configs = st.builds(
    replace,
    st.just(CONFIG),
    family=st.text(),
    layers=st.lists(layers, max_size=4).map(tuple),
    rms_eps=positive,
    embedding_scale=positive,
    activation=st.sampled_from(["silu", "gelu_tanh"]),
    logit_soft_cap=st.none() | positive,
    tied_embeddings=st.booleans(),
)


@settings(max_examples=50, deadline=None)
@given(configs)
def test_a_config_comes_back_from_json_as_it_was(config: ModelConfig):
    text = json.dumps(config_to_json(config), allow_nan=False)
    assert config_from_json(json.loads(text)) == config


def changed(path: str, value: Any) -> dict[str, Any]:
    raw = json.loads(json.dumps(config_to_json(CONFIG)))
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    inner = raw
    for part in parents:
        inner = inner[part]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return raw


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("width", None, "here: has no width"),
        ("width", 96.0, "here.width: 96.0"),
        ("width", True, "here.width: True"),
        ("rms_eps", "1e-6", "here.rms_eps: '1e-6'"),
        ("activation", "relu", "here.activation: 'relu'"),
        ("family", 3, "here.family: 3"),
        ("experts", 8, "here: experts is unknown"),
        ("layers", {}, "here.layers: {}"),
        ("attention", [], "here.attention: []"),
        ("attention.head_dim", None, "here.attention: has no head_dim"),
        ("layers.0.window", "24", "here.layers[0].window: '24'"),
        ("layers.1.rope.scaling", 8, "here.layers[1].rope.scaling: type None"),
        ("layers.1.rope.scaling.type", "dynamic", "here.layers[1].rope.scaling: type 'dynamic'"),
        ("layers.1.rope.scaling.factor", None, "here.layers[1].rope.scaling: has no factor"),
    ],
)
def test_a_damaged_config_is_refused_by_key(path: str, value: Any, problem: str):
    with pytest.raises(ModelError) as caught:
        config_from_json(changed(path, value), "here")
    assert str(caught.value).startswith(problem)

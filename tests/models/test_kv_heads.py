"""Pooling KV heads: what becomes of the weights, and of what the model computes."""

from dataclasses import replace

import chex
import numpy as np
import pytest
from flax import nnx

from jaxkv.models.config import AttentionConfig
from jaxkv.models.decode_model import FlaxDecodeModel
from jaxkv.models.decoder import Decoder
from jaxkv.models.dense import dense_logits
from jaxkv.models.errors import ModelError
from jaxkv.models.kv_heads import POOLINGS, with_kv_heads
from tests.engine.tiny import TINY, V, decode_model

H, D = 4, 8
MHA = replace(
    TINY,
    attention=AttentionConfig(num_heads=H, num_kv_heads=H, head_dim=D, scale=0.35, qkv_bias=True),
)
TOKENS = np.random.default_rng(0).integers(0, V, (2, 40)).astype(np.int32)


def random_model(seed: int = 0) -> FlaxDecodeModel:
    """Biases are not zero."""
    model = decode_model(Decoder(MHA, rngs=nnx.Rngs(seed)))
    rng = np.random.default_rng(seed)
    named = {
        path: 0.3 * rng.standard_normal(x.shape).astype(np.float32) if path[-1] == "bias" else x
        for path, x in model.named_params.items()
    }
    return FlaxDecodeModel.from_named(model.config, model.graphdef, named)


def logits(model: FlaxDecodeModel) -> np.ndarray:
    return np.asarray(dense_logits(model.decoder(model.params), TOKENS))


def kv(model: FlaxDecodeModel, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """K and V projections `[K, D, E + 1]`, bias last."""
    path = ("layers", layer, "attention", "qkv")
    named = model.named_params
    joined = np.concatenate(
        [named[(*path, "weight")], np.asarray(named[(*path, "bias")])[:, None]], axis=1
    ).reshape(-1, D, 33)
    return tuple(np.split(joined[H:], 2))


@pytest.mark.parametrize("num_heads", [1, 2])
def test_mean_and_first_pool_neighbouring_heads(num_heads):
    model = random_model()
    mean, first = (with_kv_heads(model, num_heads, how) for how in ("mean", "first"))
    assert mean.config.attention.num_kv_heads == num_heads
    for layer in range(2):
        for part in (0, 1):
            whole = kv(model, layer)[part]
            for group in range(num_heads):
                own = whole[group * H // num_heads : (group + 1) * H // num_heads]
                chex.assert_trees_all_close(
                    kv(mean, layer)[part][group], sum(own) / len(own), rtol=1e-7, atol=1e-6
                )
                chex.assert_trees_all_equal(kv(first, layer)[part][group], own[0])


def test_random_heads_have_the_size_of_the_old_ones_and_depend_on_the_seed():
    model = random_model()
    one, same, other = (with_kv_heads(model, 1, "random", seed=s) for s in (1, 1, 2))
    assert 0.8 < kv(one, 0)[0][..., :-1].std() / kv(model, 0)[0].std() < 1.2
    chex.assert_trees_all_equal(logits(one), logits(same))
    assert not np.allclose(logits(one), logits(other))


def turned_copies(seed: int = 3) -> FlaxDecodeModel:
    """A model whose heads of each layer are one head, turned in ways that can be undone."""
    model, rng = random_model(seed), np.random.default_rng(seed)
    named = dict(model.named_params)
    for layer in range(2):
        path = ("layers", layer, "attention", "qkv")
        heads = np.concatenate(
            [named[(*path, "weight")], np.asarray(named[(*path, "bias")])[:, None]], axis=1
        ).reshape(3 * H, D, 33)
        for head in range(H):
            turn = np.exp(1j * rng.uniform(0, 2 * np.pi, (D // 2, 1)))
            z = turn * (heads[H, : D // 2] + 1j * heads[H, D // 2 :])
            if head:
                heads[H + head] = np.concatenate([z.real, z.imag])
                orthogonal, _ = np.linalg.qr(rng.standard_normal((D, D)))
                heads[2 * H + head] = orthogonal @ heads[2 * H]
        flat = heads.reshape(-1, 33).astype(np.float32)
        named[(*path, "weight")], named[(*path, "bias")] = flat[:, :-1], flat[:, -1]
    return FlaxDecodeModel.from_named(model.config, model.graphdef, named)


def test_heads_that_are_one_head_turned_are_pooled_without_loss_when_aligned():
    model = turned_copies()
    want = logits(model)
    chex.assert_trees_all_close(
        logits(with_kv_heads(model, 1, "aligned")), want, rtol=1e-7, atol=2e-4
    )
    assert np.abs(logits(with_kv_heads(model, 1, "mean")) - want).max() > 0.1


@pytest.mark.parametrize("num_heads", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_aligned_heads_are_nearer_to_their_mean(num_heads):
    model = random_model()

    def lost(how) -> float:
        return float(np.mean((logits(with_kv_heads(model, num_heads, how)) - logits(model)) ** 2))

    assert lost("aligned") < lost("mean")


@pytest.mark.parametrize("how", POOLINGS)
def test_as_many_heads_as_there_are_is_the_model_itself(how):
    model = random_model()
    assert with_kv_heads(model, H, how) is model


@pytest.mark.parametrize("num_heads", [0, 3, 8])
def test_a_number_that_does_not_divide_is_refused(num_heads):
    with pytest.raises(ModelError, match=f"{num_heads} KV heads do not divide the model's 4"):
        with_kv_heads(random_model(), num_heads)


def test_normed_keys_cannot_be_aligned():
    config = replace(MHA, attention=replace(MHA.attention, qk_norm=True))
    model = decode_model(Decoder(config, rngs=nnx.Rngs(0)))
    assert with_kv_heads(model, 2).config.attention.num_kv_heads == 2
    with pytest.raises(ModelError, match="not normed"):
        with_kv_heads(model, 2, "aligned")

"""The decoder against numpy in float64, its switches one by one, and steps however they are cut."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.attention import AttentionBackend, StepInputs
from jaxkv.cache import CacheSpec, KVCache, LayerSpec, choose_formats, init_cache
from jaxkv.models.config import AttentionConfig, LayerConfig, LinearScaling, ModelConfig, RopeConfig
from jaxkv.models.decoder import Decoder
from jaxkv.models.layers import cpu_product
from tests.engine.tiny import decode_model
from tests.models.numpy_decoder import decode_naively

V, P, M = 61, 8, 8
LOCAL, GLOBAL = RopeConfig(theta=50.0), RopeConfig(theta=900.0, scaling=LinearScaling(factor=4.0))

PLAIN = ModelConfig(
    family="llama",
    vocab_size=V,
    width=24,
    mlp_width=40,
    layers=(LayerConfig(window=None, rope=LOCAL),) * 2,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.35),
    max_positions=64,
    rms_eps=1e-5,
)
EVERYTHING = replace(
    PLAIN,
    family="gemma2",
    layers=(LayerConfig(window=6, rope=LOCAL), LayerConfig(window=None, rope=GLOBAL)),
    attention=replace(PLAIN.attention, qkv_bias=True, qk_norm=True, soft_cap=1.5, scale=0.6),
    activation="gelu_tanh",
    post_norms=True,
    embedding_scale=24**0.5,
    logit_soft_cap=3.0,
    tied_embeddings=False,
    rms_eps=1e-2,
)


def decoder_of(config: ModelConfig) -> Decoder:
    """Random weights; norms and biases are neither one nor zero.

    A parameter's values follow from its path and shape, so that two configs share what they can.
    """
    module = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(module)

    def values(path: tuple[str | int, ...], shape: tuple[int, ...]) -> jax.Array:
        rng = np.random.default_rng(list(repr(path).encode()))
        if len(shape) == 1:
            drawn = rng.uniform(0.3, 1.7, shape)
        else:
            drawn = rng.standard_normal(shape) * shape[1] ** -0.5
        return jnp.asarray(drawn, jnp.float32)

    flat = nnx.to_flat_state(state)
    filled = [(path, nnx.Param(values(path, leaf.get_value().shape))) for path, leaf in flat]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def empty_cache(config: ModelConfig) -> KVCache:
    attention = config.attention
    layers = tuple(
        LayerSpec(kv_heads=attention.num_kv_heads, head_dim=attention.head_dim, window=layer.window)
        for layer in config.layers
    )
    return init_cache(
        CacheSpec(
            layers=layers,
            page_size=P,
            num_pages=(20,) * len({layer.window for layer in layers}),
            formats=choose_formats("f32", layers),
        )
    )


class Runner:
    """One sequence on its way through a decoder, in steps of 48 rows.

    One that is `quick` takes half the time to compile: naive attention, and no optimisation.
    """

    T = 48

    def __init__(self, decoder: Decoder, *, quick: bool = False):
        self.decoder = decoder
        backend = AttentionBackend(name="reference") if quick else AttentionBackend(query_tile=16)
        options = {"xla_backend_optimization_level": 0} if quick else None
        self.model = decode_model(decoder)

        def step(params, cache, inputs):
            hidden, cache = self.model.forward(params, cache, inputs, backend)
            return self.model.logits(params, hidden), cache

        self.step = jax.jit(step, compiler_options=options)

    def logits(self, tokens: list[int], *chunks: int, garbage: int = 0) -> np.ndarray:
        """`[S, V]`, the sequence cut into these chunks; `garbage` fills padding rows."""
        cache = empty_cache(self.decoder.config)
        rng = np.random.default_rng(0)
        tables = tuple(
            jnp.asarray(rng.permutation(np.arange(1, 20))[None, :M], jnp.int32)
            for _ in cache.spec.groups
        )
        out, start = [], 0
        for n in chunks:
            rows = np.full(self.T, garbage, np.int32)
            rows[:n] = tokens[start : start + n]
            start += n
            inputs = StepInputs.of(
                jnp.asarray(rows),
                jnp.array([start], jnp.int32),
                jnp.array([0, n], jnp.int32),
                *tables,
            )
            logits, cache = self.step(self.model.params, cache, inputs)
            out.append(np.array(logits)[:n])
        assert start == len(tokens)
        return np.concatenate(out)


TOKENS = np.random.default_rng(3).integers(0, V, 45).tolist()


@pytest.fixture(scope="module")
def everything() -> Runner:
    return Runner(decoder_of(EVERYTHING))


@pytest.fixture(scope="module")
def whole(everything: Runner) -> np.ndarray:
    return everything.logits(TOKENS, 45)


def test_a_config_with_everything_on_equals_numpy(everything: Runner, whole):
    chex.assert_trees_all_close(
        whole, decode_naively(everything.decoder, TOKENS), rtol=1e-7, atol=2e-5
    )


def test_a_plain_config_equals_numpy():
    runner = Runner(decoder_of(PLAIN))
    want = decode_naively(runner.decoder, TOKENS)
    chex.assert_trees_all_close(runner.logits(TOKENS, 45), want, rtol=1e-7, atol=2e-5)


SWITCHES = [
    pytest.param(dict(qk_norm=False), id="qk_norm"),
    pytest.param(dict(qkv_bias=False), id="qkv_bias"),
    pytest.param(dict(soft_cap=None), id="attention soft cap"),
    pytest.param(dict(scale=0.35), id="scale"),
    pytest.param(dict(num_kv_heads=4), id="kv heads"),
    pytest.param(dict(post_norms=False), id="post_norms"),
    pytest.param(dict(logit_soft_cap=None), id="logit soft cap"),
    pytest.param(dict(embedding_scale=1.0), id="embedding scale"),
    pytest.param(dict(activation="silu"), id="activation"),
    pytest.param(dict(tied_embeddings=True), id="tied embeddings"),
    pytest.param(dict(rms_eps=1e-6), id="epsilon"),
    pytest.param(dict(layers=(PLAIN.layers[0], EVERYTHING.layers[1])), id="window"),
    pytest.param(
        dict(layers=(EVERYTHING.layers[0], replace(EVERYTHING.layers[1], rope=LOCAL))),
        id="rope base and scaling",
    ),
]


@pytest.mark.parametrize("change", SWITCHES)
def test_each_switch_changes_the_result_and_equals_numpy_either_way(whole, change):
    attention = {k: v for k, v in change.items() if hasattr(PLAIN.attention, k)}
    rest = {k: v for k, v in change.items() if k not in attention}
    config = replace(EVERYTHING, attention=replace(EVERYTHING.attention, **attention), **rest)
    runner = Runner(decoder_of(config), quick=True)
    got = runner.logits(TOKENS, 45)
    chex.assert_trees_all_close(got, decode_naively(runner.decoder, TOKENS), rtol=1e-7, atol=2e-5)
    assert np.abs(got - whole).max() > 1e-3


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([30] + [1] * 15, id="prefill and decode"),
        pytest.param([1] * 45, id="token by token"),
        pytest.param([7, 8, 9, 21], id="chunks across pages"),
        pytest.param([44, 1], id="all but one"),
    ],
)
def test_a_sequence_in_steps_gives_the_logits_of_one_prefill(everything: Runner, whole, chunks):
    chex.assert_trees_all_close(everything.logits(TOKENS, *chunks), whole, rtol=1e-7, atol=2e-5)


def test_what_is_in_padding_rows_does_not_matter(everything: Runner):
    chunks = [20, 1, 1, 23]
    chex.assert_trees_all_equal(
        everything.logits(TOKENS, *chunks),
        everything.logits(TOKENS, *chunks, garbage=V - 1),
    )


def test_a_later_token_does_not_change_an_earlier_row(everything: Runner, whole):
    other = [*TOKENS[:40], *[(t + 1) % V for t in TOKENS[40:]]]
    changed = everything.logits(other, 45)
    chex.assert_trees_all_equal(changed[:40], whole[:40])
    assert (changed[40:] != whole[40:]).any(axis=-1).all()


def test_a_window_hides_what_lies_before_it():
    config = replace(PLAIN, layers=(LayerConfig(window=6, rope=LOCAL),))
    runner = Runner(decoder_of(config))
    other = [(TOKENS[0] + 1) % V, *TOKENS[1:]]
    one, two = runner.logits(TOKENS, 45), runner.logits(other, 45)
    assert (one[:6] != two[:6]).any(axis=-1).all()
    chex.assert_trees_all_equal(one[6:], two[6:])


@pytest.mark.parametrize("out_in", [(960, 576), (3072, 576), (576, 1536), (24, 32)], ids=str)
def test_a_product_of_64_rows_or_more_gives_each_row_its_own_bits(out_in):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, out_in[1])).astype(np.float32)
    weight = rng.standard_normal(out_in).astype(np.float32)
    rows = jax.jit(cpu_product)
    whole = np.array(rows(x, weight))
    moved = np.array(rows(np.concatenate([x[200:], x[:200]]), weight))
    chex.assert_trees_all_equal(moved, np.concatenate([whole[200:], whole[:200]]))
    for T in (64, 128):
        chex.assert_trees_all_equal(rows(x[:T], weight), whole[:T])

"""The adapter from cache to kernels: where a step's tokens go, and what they then see."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.attention import AttentionBackend, StepInputs, update_and_attend
from jaxkv.cache import (
    CacheSpec,
    LayerSpec,
    choose_formats,
    gather_dense,
    init_cache,
    platform,
)

P, H, K, D = 8, 4, 2, 8
LAYERS = (LayerSpec(kv_heads=K, head_dim=D, window=5), LayerSpec(kv_heads=K, head_dim=D))
SPEC = CacheSpec(
    layers=LAYERS,
    page_size=P,
    num_pages=(9, 9),
    formats=choose_formats("f32", LAYERS),
)


CODES = ["int8", "fp8_e4m3", "fp8_e5m2", "int4", "kivi4", "kivi2", "kivi_k4v2", "kivi2_r3_s1"]
HARD = {"NaN": np.nan, "inf": np.inf, "outlier": 1e4, "huge": 3e38}


@pytest.mark.parametrize("value", HARD)
@pytest.mark.parametrize("name", CODES)
def test_no_value_of_k_or_v_makes_an_output_of_codes_other_than_finite(name, value):
    layers = (LayerSpec(kv_heads=K, head_dim=D),)
    formats = choose_formats(name, layers)
    spec = CacheSpec.plan(layers, formats, page_size=P, num_tokens=8 * P)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((20, heads, D)).astype(np.float32) for heads in (H, K, K))
    k[13, 0, 3] = v[11, 1, 2] = HARD[value]
    step = StepInputs.of(
        jnp.zeros(20, jnp.int32),
        jnp.array([20], jnp.int32),
        jnp.array([0, 20], jnp.int32),
        *[jnp.array([[5, 2, 7]], jnp.int32)] * len(spec.groups),
    )
    out, _ = update_and_attend(
        init_cache(spec),
        0,
        tuple(map(jnp.asarray, (q, k, v))),
        step,
        scale=0.3,
    )
    assert np.isfinite(out).all()


def step_of(seq_lens: list[int], query_lens: list[int], tables: list[np.ndarray], T: int):
    return StepInputs.of(
        jnp.zeros(T, jnp.int32),
        jnp.array(seq_lens, jnp.int32),
        jnp.array(np.cumsum([0, *query_lens]), jnp.int32),
        *[jnp.asarray(table, jnp.int32) for table in tables],
    )


TABLES = [np.array([[3, 7, 1], [5, 0, 0], [2, 8, 0]]), np.array([[8, 2, 4], [1, 0, 0], [6, 3, 0]])]


def test_each_row_has_its_sequence_and_position_and_padding_none():
    step = step_of([19, 0, 9], [3, 0, 9], TABLES, T=16)
    seq, position = step.places()
    assert seq[:12].tolist() == [0] * 3 + [2] * 9
    assert position[:12].tolist() == [16, 17, 18, *range(9)]
    assert (np.array(position[12:]) < 0).all()


@pytest.mark.parametrize("group", [0, 1])
def test_slots_follow_the_table_of_the_group_and_padding_goes_to_the_null_page(group):
    step = step_of([19, 6, 9], [5, 6, 1], TABLES, T=16)
    positions = [(0, p) for p in range(14, 19)] + [(1, p) for p in range(6)] + [(2, 8)]
    want = [TABLES[group][b, p // P] * P + p % P for b, p in positions]
    assert step.slots(group, P).tolist() == want + [0] * 4


def wide_pages(spec: CacheSpec) -> CacheSpec:
    """Returns wider pages, as on a TPU if D does not fill a register."""
    layers = tuple(dataclasses.replace(layer, head_dim=D + 5) for layer in spec.layers)
    return dataclasses.replace(spec, layers=layers, layout="paired")


def test_an_accelerator_stores_layers_whose_rows_its_kernel_takes(monkeypatch):
    dims, wide = [64, 80, 96, 128, 192, 256], [64, 128, 128, 128, 192, 256]
    layers = tuple(LayerSpec(kv_heads=1, head_dim=dim) for dim in dims)

    def planned():
        formats = choose_formats("f32", layers)
        spec = CacheSpec.plan(layers, formats, page_size=P, num_tokens=P)
        return spec.layout, [layer.head_dim for layer in spec.layers]

    assert planned() == ("head_major", dims)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert planned() == ("paired", wide)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(platform, "not_hopper", lambda: "an A100")
    assert planned() == ("head_major", dims)
    monkeypatch.setattr(platform, "not_hopper", lambda: None)
    assert planned() == ("head_major", wide)


def softmax_attention(q, k, v, position: int, window: int | None) -> np.ndarray:
    """Attention of one query `[H, D]` over the keys `[S, K, D]` up to its position."""
    low = 0 if window is None else max(0, position - window + 1)
    out = np.zeros((H, D))
    for h in range(H):
        keys, values = (x[low : position + 1, h // (H // K)] for x in (k, v))
        weights = np.exp(keys @ q[h] * 0.4)
        out[h] = weights / weights.sum() @ values
    return out


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("layer", [0, 1], ids=["window", "full"])
@pytest.mark.parametrize(
    "spec", [SPEC, wide_pages(SPEC)], ids=["as the model", "paired, of a larger D"]
)
def test_chunks_written_and_attended_equal_attention_over_the_whole(layer, backend, spec):
    rng = np.random.default_rng(layer)
    lens = (19, 6, 9)
    q, k, v = (
        [rng.standard_normal((n, heads, D)).astype(np.float32) for n in lens] for heads in (H, K, K)
    )
    cache = init_cache(spec)
    done = [0, 0, 0]
    for chunk in ([7, 6, 0], [1, 0, 8], [11, 0, 1]):
        spans = [slice(d, d + n) for d, n in zip(done, chunk, strict=True)]
        done = [span.stop for span in spans]
        step = step_of(done, chunk, TABLES, T=16)

        def rows(parts, spans=spans):
            joined = np.concatenate([part[span] for part, span in zip(parts, spans, strict=True)])
            padding = np.full((16 - len(joined), *joined.shape[1:]), 7.0, np.float32)
            return jnp.asarray(np.concatenate([joined, padding]))

        out, cache = update_and_attend(
            cache,
            layer,
            (rows(q), rows(k), rows(v)),
            step,
            scale=0.4,
            backend=AttentionBackend(name=backend),
        )
        want = [
            softmax_attention(q[b][p], k[b], v[b], p, spec.layers[layer].window)
            for b, span in enumerate(spans)
            for p in range(span.start, span.stop)
        ]
        chex.assert_trees_all_close(out[: len(want)], np.array(want), rtol=1e-7, atol=1e-5)
        assert not np.array(out[len(want) :]).any()
    keys, values = gather_dense(cache, layer, step.page_tables[cache.groups_of(layer)[0]])
    for b, n in enumerate(lens):
        for got, want in ((keys, k), (values, v)):
            chex.assert_trees_all_equal(got[b, :n, :, :D], want[b])
            assert not np.array(got[b, :n, :, D:]).any()
    assert not np.array(cache.layers[1 - layer].kv).any()


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_that_is_not_there_is_refused(layer):
    tables = [np.array([[1]])] * 2
    step = step_of([3], [3], tables, T=3)
    qkv = tuple(jnp.zeros((3, heads, D)) for heads in (H, K, K))
    with pytest.raises(ValueError, match=f"layer must be 0 to 1, got {layer}"):
        update_and_attend(init_cache(SPEC), layer, qkv, step, scale=1.0)

"""The functional cache against a dict of lists, and what its transformations may touch."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache import (
    CacheSpec,
    KVCache,
    LayerSpec,
    choose_formats,
    copy_pages,
    export_pages,
    gather_dense,
    import_pages,
    init_cache,
    move_tokens,
    write,
)
from jaxkv.testing.layouts import by_tokens

P = 8
WINDOWS = (None, 12, None)
K, D = (2, 1, 2), 8
LAYERS = tuple(LayerSpec(kv_heads=k, head_dim=D, window=w) for k, w in zip(K, WINDOWS, strict=True))
SPEC = CacheSpec(
    layers=LAYERS,
    page_size=P,
    num_pages=(9, 6),
    formats=choose_formats("f32", LAYERS),
    layout="head_major",
)
every_layout = pytest.mark.parametrize("layout", ["head_major", "paired"])


def filled(spec: CacheSpec, seed: int = 0) -> KVCache:
    """Returns a cache of random values, different in every slot."""
    rng = np.random.default_rng(seed)
    cache = init_cache(spec)
    for i, pages in enumerate(cache.layers):
        values = rng.standard_normal(pages.kv.shape)
        kv = jnp.asarray(values, pages.kv.dtype)
        cache = cache.replace_layer(i, replace(pages, kv=kv))
    return cache


def arrays(cache: KVCache) -> list[np.ndarray]:
    return [np.array(pages.kv) for pages in cache.layers]


def ids(*pages: int) -> jax.Array:
    return jnp.array(pages, jnp.int32)


@pytest.mark.parametrize(
    "layer, layout, name",
    [
        (0, "paired", "f32"),
        (1, "head_major", "bf16"),
        (1, "head_major", "f32"),
        (2, "paired", "bf16"),
    ],
)
def test_what_is_written_is_what_is_gathered(layer, layout, name):
    spec = replace(SPEC, layout=layout, formats=choose_formats(name, LAYERS))
    cache = init_cache(spec)
    rng = np.random.default_rng(layer)
    table = rng.permutation(np.arange(1, 6))  # one sequence of five pages, out of order
    stored: dict[int, list[np.ndarray]] = {}  # position -> [k, v]
    start = 0
    for n in (1, P + 2, P + 2, 1, P + 2, 1):
        k, v = rng.standard_normal((2, n, K[layer], D)).astype(np.float32)
        position = np.arange(start, start + n)
        slots = table[position // P] * P + position % P
        cache = write(cache, layer, *map(jnp.asarray, (k, v)), jnp.asarray(slots, jnp.int32))
        stored |= {int(p): [k[i], v[i]] for i, p in enumerate(position)}
        start += n
    got = gather_dense(cache, layer, jnp.asarray(table[None], jnp.int32))
    dtype = jnp.dtype(dict(f32="float32", bf16="bfloat16")[name])
    for part in (0, 1):
        assert got[part].shape == (1, 5 * P, K[layer], D)
        assert got[part].dtype == dtype
        want = np.array(jnp.asarray([stored[p][part] for p in range(start)], dtype))
        chex.assert_trees_all_equal(np.array(got[part][0, :start]), want)
        assert not np.array(got[part][0, start:]).any()  # pages start as zeros
    untouched = [np.array(p.kv) for i, p in enumerate(cache.layers) if i != layer]
    assert not any(array.any() for array in untouched)


@every_layout
def test_rows_of_a_table_are_gathered_independently(layout):
    cache = filled(replace(SPEC, layout=layout))
    table = np.array([[3, 1], [1, 4], [0, 0]], np.int32)
    both = gather_dense(cache, 0, jnp.asarray(table))
    kv = by_tokens(arrays(cache)[0], layout)
    for b, row in enumerate(table):
        want = np.concatenate([kv[page] for page in row])  # [M * P, 2K, D]
        chex.assert_trees_all_equal(both[0][b], want[:, 0::2])
        chex.assert_trees_all_equal(both[1][b], want[:, 1::2])


@every_layout
@pytest.mark.parametrize("name", ["f32", "int8", "int4"])
def test_moved_tokens_are_read_where_they_went_and_all_others_where_they_were(name, layout):
    formats = choose_formats(name, LAYERS)
    cache = init_cache(replace(SPEC, formats=formats, layout=layout))
    k, v = np.random.default_rng(0).standard_normal((2, 3 * P, K[0], D)).astype(np.float32)
    slots = jnp.arange(P, 4 * P, dtype=jnp.int32)
    cache = write(cache, 0, jnp.asarray(k), jnp.asarray(v), slots)
    table = jnp.asarray([[1, 2, 3, 4]], jnp.int32)
    before = [np.asarray(x[0]) for x in gather_dense(cache, 0, table)]
    source = np.array([[P, 2 * P + 3, 3 * P], [P + 1, P + 2, 2 * P]])  # of each KV head
    target = np.array([[2 * P + 3, P, 4 * P + 5], [3 * P, 9 * P, P + 7]])
    moved = move_tokens(cache, 0, *(jnp.asarray(x, jnp.int32) for x in (source, target)))
    after = [np.asarray(x[0]) for x in gather_dense(moved, 0, table)]
    for old, new in zip(before, after, strict=True):
        want = old.copy()
        for head in range(K[0]):
            inside = target[head] < 9 * P  # what is outside the pool writes nothing
            want[target[head][inside] - P, head] = old[source[head][inside] - P, head]
        chex.assert_trees_all_equal(new, want)


@every_layout
@pytest.mark.parametrize("group, layers", [(0, (0, 2)), (1, (1,))])
def test_copying_pages_changes_only_the_targets_in_the_layers_of_the_group(group, layers, layout):
    cache = filled(replace(SPEC, layout=layout))
    before = arrays(cache)
    # 2 is both: all reads come before all writes.
    copied = arrays(copy_pages(cache, group, ids(1, 2, 4), ids(2, 3, 5)))
    for i, (old, new) in enumerate(zip(before, copied, strict=True)):
        want = old.copy()
        if i in layers:
            want[[2, 3, 5]] = old[[1, 2, 4]]
        chex.assert_trees_all_equal(new, want)
    for now, then in zip(arrays(cache), before, strict=True):
        chex.assert_trees_all_equal(now, then)  # the argument is a value


@every_layout
@pytest.mark.parametrize("group, layers", [(0, (0, 2)), (1, (1,))])
def test_exported_pages_arrive_in_another_cache_at_other_ids(group, layers, layout):
    spec = replace(SPEC, layout=layout)
    source, target = filled(spec, 0), filled(replace(spec, num_pages=(20, 20)), 1)
    old, before = arrays(source), arrays(target)
    after = arrays(import_pages(target, group, ids(7, 1), export_pages(source, group, ids(2, 5))))
    for i, want in enumerate(before):
        if i in layers:
            want[[7, 1]] = old[i][[2, 5]]
        chex.assert_trees_all_equal(after[i], want)


@pytest.mark.parametrize(
    "target, group, pages, message",
    [
        pytest.param(
            dict(formats=choose_formats("bf16", LAYERS)),
            0,
            2,
            r"format f32 \(head_major\), group 0, 2 layers, do not fit a cache of format bf16",
            id="format",
        ),
        pytest.param(dict(layout="paired"), 0, 2, r"a cache of format f32 \(paired\)", id="layout"),
        pytest.param({}, 0, 1, r"have shapes .*, the group takes", id="number of pages"),
        pytest.param(
            {}, 1, 2, r"group 0, 2 layers, do not fit .*, group 1, 1 layers", id="number of layers"
        ),
        pytest.param(dict(page_size=16), 0, 2, r"\(2, 4, 16, 8\)", id="page size"),
    ],
)
def test_pages_that_do_not_fit_are_refused_by_name(target, group, pages, message):
    exported = export_pages(filled(SPEC), 0, ids(1, 2))
    with pytest.raises(ValueError, match=message):
        import_pages(init_cache(replace(SPEC, **target)), group, ids(3, 4)[:pages], exported)


@pytest.mark.parametrize(
    "change, message",
    [
        pytest.param(dict(layers=(), num_pages=()), "at least one layer", id="no layer"),
        pytest.param(dict(num_pages=(9,)), "1 entries for 2 layer groups", id="too few pools"),
        pytest.param(dict(num_pages=(9, 6, 6)), "3 entries for 2 layer", id="too many pools"),
        pytest.param(dict(num_pages=(9, 1)), "the null page and one more", id="null page only"),
    ],
)
def test_a_spec_that_describes_no_cache_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        init_cache(replace(SPEC, **change))


def test_an_empty_cache_is_all_zeros_and_knows_its_groups():
    cache = init_cache(SPEC)
    assert not any(array.any() for array in arrays(cache))
    assert [list(cache.groups_of(layer)) for layer in range(3)] == [[0], [1], [0]]
    groups = [(group.window, group.members) for group in cache.spec.groups]
    assert groups == [(None, (0, 2)), (12, (1,))]
    assert [pages.num_pages for pages in cache.layers] == [9, 6, 9]


@every_layout
@pytest.mark.parametrize("operation", ["write", "copy", "import"])
def test_a_donated_cache_is_changed_in_place(operation, layout):
    spec = replace(SPEC, layout=layout, num_pages=(64, 64))

    def change(cache: KVCache, rows: jax.Array, index: jax.Array) -> KVCache:
        if operation == "write":
            for layer, k in enumerate(K):
                cache = write(cache, layer, rows[:, :k], rows[:, :k], index)
            return cache
        for group in (0, 1):
            if operation == "copy":
                cache = copy_pages(cache, group, index, index + 1)
            else:
                cache = import_pages(cache, group, index, export_pages(cache, group, index + 1))
        return cache

    rows, index = jnp.ones((4, 2, D)), ids(1, 9, 17, 33)
    cache = init_cache(spec)
    step = jax.jit(change, donate_argnums=0).lower(cache, rows, index).compile()
    memory = step.memory_analysis()
    assert memory.alias_size_in_bytes >= spec.nbytes
    # No second pool is made on the way either.
    assert memory.temp_size_in_bytes < cache.layers[0].kv.nbytes
    step(cache, rows, index)
    assert all(pages.kv.is_deleted() for pages in cache.layers)


def test_jit_sees_a_cache_of_the_same_spec_as_the_same_type():
    step = jax.jit(chex.assert_max_traces(lambda cache: cache, n=1))
    step(filled(SPEC))
    step(init_cache(SPEC))
    with pytest.raises(AssertionError, match="traced > 1 times"):
        step(init_cache(replace(SPEC, layout="paired")))

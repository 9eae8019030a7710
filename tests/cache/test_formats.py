"""Formats by name and by layer, their bytes on the device, and pages of one refused by another."""

from dataclasses import dataclass, replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache import (
    CacheSpec,
    KVRanges,
    LayerSpec,
    check_choice,
    choose_formats,
    export_pages,
    format_id,
    get_format,
    import_pages,
    init_cache,
    rotate,
)
from jaxkv.cache.rotation import hadamard
from jaxkv.engine import EngineConfig, Request
from jaxkv.kv_format import CHANNEL_GROUP, FORMATS, PAGE_SIZES, preferred_page_size
from pallas_kernels import AffinePages, Layout, checks, quantised_pages
from pallas_kernels.pages import numbers_shape, pool_shape
from tests.engine.tiny import Tiny, run

LAYERS = tuple(LayerSpec(kv_heads=2, head_dim=64, window=w) for w in (512, 512, None, 512, None))
NAMES = [name for name, spec in FORMATS.items() if spec.kind != "static"]
RANGES = KVRanges(((1.0, 2.0, 3.0, 4.0),) * 5)


def names(text: str, ranges: KVRanges | None = None) -> list[str]:
    return [kv_format.name for kv_format in choose_formats(text, LAYERS, ranges)]


def test_later_choices_count_more():
    assert names("kivi4") == ["kivi4"] * 5
    assert names("kivi4,window=bf16,0=int8,-1=f16") == ["int8", "bf16", "kivi4", "bf16", "f16"]
    assert names("bf16, full = int4") == ["bf16", "bf16", "int4", "bf16", "int4"]


@pytest.mark.parametrize("name", [*NAMES, "kivi2_r32_s1", "kivi_k4v2_r5", "kivi4_s2"])
def test_a_format_is_found_by_its_name(name):
    assert get_format(name).name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int3", "no KV format 'int3'; there are f32, bf16"),
        ("", "no KV format ''"),
        ("kivi3", "no KV format"),
        ("kivi4_s1_r5", "no KV format"),
        ("bf16,int8", "must be LAYERS=FORMAT"),
        ("bf16,=int8", "must be LAYERS=FORMAT"),
        ("bf16,1_0=int8", "'1_0' must be"),
        ("bf16,9=int8", "no layer 9: the model has 5"),
        ("bf16,-6=int8", "no layer -6"),
        ("bf16,odd=int8", "'odd' must be `window`, `full` or a layer's number"),
        ("int8_static", "needs scales that `calibrate` measured"),
    ],
)
def test_a_choice_that_is_none_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        choose_formats(text, LAYERS)
    if "static" not in text and "no layer" not in message:
        with pytest.raises(ValueError, match=message):
            check_choice(text)


def test_static_formats_carry_the_id_and_the_scales_of_their_ranges(tmp_path):
    RANGES.save(tmp_path / "ranges.json")
    loaded = KVRanges.load(tmp_path / "ranges.json")
    assert loaded == RANGES
    (kv_format, *_) = choose_formats("int8_static", LAYERS, loaded)
    assert kv_format.name == f"int8_static@{RANGES.id}"
    pages = kv_format.init_pages(2, 8, 2, 64, "head_major")
    chex.assert_trees_all_close(pages.scales, np.array([1, 2, 3, 4]) / 127, rtol=1e-6)
    other = KVRanges(((1.0, 2.0, 3.0, 5.0), *RANGES.largest[1:]))
    assert names("int8_static", other) != names("int8_static", RANGES)


HEAD = '{"kind": "jaxkv KV ranges", "largest": '


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[1]",
        '{"kind": 3}',
        "[" * 200_000,
        *(HEAD + f"[[{x}]]}}" for x in ("0.0", "-1", "1e300", "1e-44", "NaN", "true", "1" * 400)),
        HEAD + '["12"]}',
    ],
    ids=lambda content: content[-24:],
)
def test_a_file_of_other_things_is_no_file_of_ranges(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=r"x\.json"):
        KVRanges.load(tmp_path / "x.json")


def test_ranges_of_another_model_are_refused():
    with pytest.raises(ValueError, match="ranges are of 4 layers, the model has 5"):
        choose_formats("int8_static", LAYERS, KVRanges(RANGES.largest[:4]))
    with pytest.raises(ValueError, match="have 1 KV heads in layer 0, the model has 2"):
        choose_formats("int8_static", LAYERS, KVRanges(((1.0, 2.0),) * 5))


def test_the_id_of_formats_tells_their_order():
    assert format_id(choose_formats("int8", LAYERS)) == "int8"
    assert format_id(choose_formats("int8,2=bf16", LAYERS)) == "int8*2+bf16*1+int8*2"


def test_codes_by_channel_come_in_pages_of_32():
    assert preferred_page_size("kivi4") == preferred_page_size("int8,0=kivi2_s1") == 32
    assert preferred_page_size("int4,window=f16") == 16


def test_the_kernels_have_the_same_sizes():
    """The kernels may not import jaxkv, so they have these numbers a second time."""
    assert checks.PAGE_SIZES == PAGE_SIZES
    assert quantised_pages.CHANNEL_GROUP == CHANNEL_GROUP


def test_the_formats_cannot_be_changed():
    with pytest.raises(TypeError):
        FORMATS["int8"] = FORMATS["int4"]  # pyright: ignore[reportIndexIssue]


# A format of one's own.


@dataclass(frozen=True)
class Int2:
    """2-bit codes per token and head in the rotated basis: the example of `KVFormat`."""

    name: str = "int2"
    rotates = True
    exact = None

    def init_pages(
        self, num_pages: int, page_size: int, kv_heads: int, head_dim: int, layout: Layout
    ) -> AffinePages:
        codes = pool_shape(layout, num_pages, page_size, kv_heads, head_dim // 4)
        parameters = numbers_shape(layout, num_pages, page_size, 2 * kv_heads)
        return AffinePages(
            kv=jnp.zeros(codes, jnp.uint8),
            parameters=jnp.zeros(parameters, jnp.uint32),
            bits=2,
            layout=layout,
        )

    def bytes_per_page(self, page_size: int, kv_heads: int, head_dim: int) -> int:
        return page_size * 2 * kv_heads * (head_dim // 4 + 4)


def test_a_format_of_ones_own_is_that_of_all_layers():
    formats = choose_formats(Int2(), LAYERS)
    assert formats == (Int2(),) * 5
    assert format_id(formats) == "int2"
    spec = CacheSpec.plan(LAYERS, formats, page_size=16, num_tokens=32)
    assert spec.nbytes == sum(x.nbytes for x in jax.tree.leaves(init_cache(spec)))


def test_an_engine_serves_with_a_format_of_ones_own():
    tiny, prompt = Tiny.random(), tuple(range(2, 42))
    request = Request(prompt=prompt, max_new_tokens=8)
    engine = tiny.engine(kv_format=Int2(), deterministic=True)
    first, again = run(engine, request), run(engine, request)
    assert first.tokens == again.tokens
    assert again.cached_tokens > 0
    spec = engine.spec
    assert spec.sequence_bytes(48) < tiny.engine(kv_format="int4").spec.sequence_bytes(48)

    bf16 = tiny.engine(kv_format=get_format("bf16"), deterministic=True)
    by_name = tiny.engine(kv_format="bf16", deterministic=True)
    assert run(bf16, request).tokens == run(by_name, request).tokens


@pytest.mark.parametrize(
    ("name", "message"),
    [("", "must be letters"), ("a+b", "must be letters"), ("int4", "has the name of a format of")],
)
def test_a_name_that_does_not_identify_a_format_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        choose_formats(Int2(name), LAYERS)
    with pytest.raises(ValueError, match=message):
        EngineConfig(kv_format=Int2(name))


def test_a_class_is_no_format():
    with pytest.raises(ValueError, match="must be an object, got the class Int2"):
        EngineConfig(kv_format=Int2)


# Bytes.

AT_4K = {
    "bf16": 1.0,
    "int8": 0.54,
    "int4": 0.29,
    "kivi4": 0.33,
    "kivi2": 0.21,
    "kivi2_r32_s1": 0.21,
}


def spec_of(text: str, num_tokens: int, head_dim: int = 64) -> CacheSpec:
    """A cache with the pages of one sequence, a tail page at least, and the null pages."""
    layers = tuple(LayerSpec(kv_heads=3, head_dim=head_dim) for _ in range(2))
    formats, P = choose_formats(text, layers), preferred_page_size(text)
    return CacheSpec.plan(
        layers,
        formats,
        page_size=P,
        num_tokens=num_tokens,
        most_pages=lambda group: max(1, group.num_kept(num_tokens, P)),
    )


@pytest.mark.parametrize("name", AT_4K)
def test_a_sequence_of_4096_tokens_takes_the_bytes_that_its_format_says(name):
    """Null pages are not counted: every cache has them once."""
    spec = spec_of(name, 4096)
    arrays = jax.tree.leaves(init_cache(spec))
    on_device = sum(x.nbytes - x[0].nbytes for x in arrays)
    tails = on_device - spec.sequence_bytes(4096)  # none at the end of a page, but there is room
    assert tails == (spec.bytes_per_page(1) if name in ("kivi4", "kivi2") else 0)
    assert on_device <= AT_4K[name] * (4096 * 2 * 2 * 3 * 64 * 2)
    assert spec.nbytes == sum(x.nbytes for x in arrays)


@pytest.mark.parametrize("name", AT_4K)
def test_no_longer_sequence_fits_than_the_longest_that_does(name):
    spec = spec_of(name, 4096)
    for memory in (spec.sequence_bytes(1), 10**6, 123_456_789):
        longest = spec.tokens_that_fit(memory)
        assert spec.sequence_bytes(longest) <= memory < spec.sequence_bytes(longest + 1)
    assert spec.tokens_that_fit(0) == 0


def test_odd_head_dims_take_whole_bytes_or_are_refused():
    assert get_format("kivi2").bytes_per_page(8, 1, 12) == 8 * (3 + 3 + 4 * 3) + 4 * 12
    for name, head_dim in [("int4", 9), ("kivi2", 10)]:
        with pytest.raises(ValueError, match=f"D = {head_dim}"):
            get_format(name).init_pages(2, 8, 1, head_dim, "head_major")


# Rotation.


@pytest.mark.parametrize("head_dim", [8, 64, 96, 80, 9])
def test_the_rotation_is_its_own_inverse_and_keeps_products(head_dim):
    H = hadamard(head_dim).astype(np.float64)
    chex.assert_trees_all_close(H @ H, np.eye(head_dim), rtol=1e-7, atol=1e-6)
    x, y = np.random.default_rng(0).standard_normal((2, 5, head_dim)).astype(np.float32)
    turned = [np.asarray(rotate(jnp.asarray(z))) for z in (x, y)]
    chex.assert_trees_all_close(
        (turned[0] * turned[1]).sum(-1), (x * y).sum(-1), rtol=1e-7, atol=1e-4
    )


# Pages of one format in a cache of another.


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("other", ["kivi2", "kivi4_s1", "int4", "bf16", "kivi4,0=bf16"])
def test_pages_of_another_format_are_refused_by_name(other, group):
    """Exact pages too: what they hold came of what the layers before them stored."""
    exported = export_pages(init_cache(spec_of("kivi4", 64)), group, jnp.array([1, 0]))
    spec = replace(spec_of(other, 64), page_size=32)
    target = min(group, len(spec.groups) - 1)
    with pytest.raises(ValueError, match=r"of format kivi4 .* a cache of format"):
        import_pages(init_cache(spec), target, jnp.array([1, 0]), exported)


def test_pages_of_other_scales_are_refused_by_name():
    def cache_of(ranges: KVRanges):
        formats = choose_formats("int8_static", LAYERS[:1], KVRanges(ranges.largest[:1]))
        return init_cache(
            CacheSpec(layers=LAYERS[:1], page_size=16, num_pages=(4,), formats=formats)
        )

    exported = export_pages(cache_of(RANGES), 0, jnp.array([1]))
    import_pages(cache_of(RANGES), 0, jnp.array([2]), exported)
    with pytest.raises(ValueError, match=r"int8_static@\w+ .* int8_static@\w+"):
        import_pages(cache_of(KVRanges(((9.0,) * 4,))), 0, jnp.array([1]), exported)


@pytest.mark.parametrize("name", ["int8", "int4", "kivi2_s1"])
def test_exported_pages_come_back_with_their_parameters(name):
    spec = spec_of(name, 128)
    cache, keys = init_cache(spec), iter(jax.random.split(jax.random.key(0), 100))

    def noise(x: jax.Array) -> jax.Array:
        return jax.random.uniform(next(keys), x.shape, maxval=200.0).astype(x.dtype)

    cache = jax.tree.map(noise, cache)
    for group in range(len(spec.groups)):
        ids = jnp.array([1, 0])
        back = import_pages(init_cache(spec), group, ids, export_pages(cache, group, ids))
        for index in spec.groups[group].members:
            for field, array in cache.layers[index].paged.items():
                chex.assert_trees_all_equal(back.layers[index].paged[field][:2], array[:2])

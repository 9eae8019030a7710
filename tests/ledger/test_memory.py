"""The ledger's bytes against arrays that were allocated, and against the cache's own books."""

import itertools
import math
from dataclasses import replace

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.cache import CacheSpec, KVRanges, LayerSpec, choose_formats, init_cache
from jaxkv.engine import EngineConfig
from jaxkv.errors import JaxkvError
from jaxkv.kv_format import FORMATS, PAGE_SIZES
from jaxkv.ledger import (
    CacheLedger,
    LedgerError,
    Model,
    arithmetic_intensity,
    decode_macs,
    generation_macs,
    model_from_config,
    prefill_macs,
    preset,
    simulate,
    step_seconds,
    weight_bytes,
)
from jaxkv.ledger.memory import step_weight_bytes
from jaxkv.ledger.plan import make_plan
from jaxkv.ledger.shapes import Heads
from jaxkv.models.checkpoints.gguf_config import config_from_gguf
from jaxkv.models.checkpoints.gguf_file import open_gguf

REAL = ("smollm2-135m", "gemma3-270m")
CHOICES = (
    *FORMATS,
    "kivi_k2v4_r5",
    "kivi2_r32_s1",
    "kivi4,window=bf16,0=int8,-1=f16",
    "int8_static,full=kivi2_s2",
)


def spec_layers(model: Model) -> tuple[LayerSpec, ...]:
    """Returns the layers of the engine's cache for a model."""
    mixers = [one.mixer for one in model.layers]
    assert all(isinstance(one, Heads) for one in mixers)
    return tuple(
        LayerSpec(kv_heads=m.kv_heads, head_dim=m.key_dim, window=m.span.window) for m in mixers
    )


def spec_of(model: Model, choice: str, page_size: int) -> CacheSpec:
    """A spec with another small number of pages in each group."""
    layers = spec_layers(model)
    ranges = KVRanges(tuple((1.0,) * (2 * one.kv_heads) for one in layers))
    formats = choose_formats(choice, layers, ranges)
    spec = CacheSpec(layers=layers, page_size=page_size, num_pages=(), formats=formats)
    return replace(spec, num_pages=tuple(range(2, 2 + len(spec.groups))))


def config(**keys) -> dict:
    """A config of a small Llama, with other keys."""
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 100,
    } | keys


def model_of(**keys) -> Model:
    return model_from_config(config(**keys), name="small")


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("choice", CHOICES)
def test_the_formula_is_the_nbytes_of_the_allocated_arrays(name, choice):
    page_size = 32 if "kivi" in choice else 16
    model, spec = preset(name), spec_of(preset(name), choice, page_size)
    allocated = sum(x.nbytes for x in jax.tree.leaves(init_cache(spec)))
    ours = CacheLedger.of(model, choice, page_size=page_size)
    assert ours.pool_bytes(spec.num_pages) == allocated


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(REAL),
    choice=st.sampled_from(CHOICES),
    page_size=st.sampled_from([8, 16, 31, 32, 256]),
    num_tokens=st.integers(1, 3_000),
)
def test_a_sequence_takes_what_the_cache_books_for_it(name, choice, page_size, num_tokens):
    spec = spec_of(preset(name), choice, page_size)
    ledger = CacheLedger.of(preset(name), choice, page_size=page_size)
    assert ledger.sequence_bytes(num_tokens) == spec.sequence_bytes(num_tokens)


@pytest.mark.parametrize("name, fixture", [(REAL[0], "smollm2_path"), (REAL[1], "gemma3_path")])
def test_the_presets_of_both_real_models_are_what_their_files_say(name, fixture, request):
    real = config_from_gguf(open_gguf(request.getfixturevalue(fixture)))
    K, D = real.attention.num_kv_heads, real.attention.head_dim
    assert spec_layers(preset(name)) == tuple(
        LayerSpec(kv_heads=K, head_dim=D, window=one.window) for one in real.layers
    )
    assert preset(name).head_weights == real.vocab_size * real.width


@pytest.mark.parametrize("page_size", [8, 16, 32])
def test_the_most_bytes_are_the_largest_on_the_way(page_size):
    ledger = CacheLedger.of(preset("gemma3-270m"), "kivi2_r32_s1", page_size=page_size)
    most = 0
    for n in range(1, 1_200):
        most = max(most, ledger.sequence_bytes(n))
        assert ledger.most_bytes(n) == most


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3-270m", "deepseek-v2-lite"])
@pytest.mark.parametrize("budget", [10**8, 10**9 + 7])
def test_the_largest_context_fits_and_one_more_token_does_not(name, budget):
    ledger = CacheLedger.of(preset(name), "int8")
    longest = ledger.largest_context(budget, batch=3)
    assert longest is not None
    assert 3 * ledger.most_bytes(longest) <= budget < 3 * ledger.most_bytes(longest + 1)
    batch = ledger.largest_batch(budget, 1_000)
    assert batch * ledger.most_bytes(1_000) <= budget < (batch + 1) * ledger.most_bytes(1_000)
    crossing = ledger.crossing_context(budget, batch=2)
    assert crossing is not None
    assert 2 * ledger.most_bytes(crossing - 1) < budget <= 2 * ledger.most_bytes(crossing)


def test_a_cache_that_does_not_grow_never_crosses():
    model = model_of(model_type="mistral", sliding_window=32)
    ledger = CacheLedger.of(model)
    assert ledger.crossing_context(10**9) is None
    assert ledger.largest_context(10**9) is None
    assert ledger.largest_context(10) == 0
    assert ledger.sequence_bytes(10**12) <= ledger.most_bytes(48)


def test_mla_keeps_one_latent_a_token_on_every_device():
    model = preset("deepseek-v3")
    whole = CacheLedger.of(model)
    assert whole.bytes_per_token == 61 * (512 + 64) * 2
    assert CacheLedger.of(model, devices=8).bytes_per_token == whole.bytes_per_token
    assert CacheLedger.of(model, "int8").bytes_per_token == 61 * (512 + 64 + 4)
    with pytest.raises(LedgerError, match="kivi4: needs K and V by head, but deepseek-v3 keeps"):
        CacheLedger.of(model, "kivi4")


def test_layers_that_share_keep_nothing():
    own, shared = model_of(), model_of(use_cla=True, cla_share_factor=2)
    assert CacheLedger.of(shared).bytes_per_token * 2 == CacheLedger.of(own).bytes_per_token
    assert CacheLedger.of(preset("gemma-3n-e4b")).bytes_per_token == 20 * 2 * 2 * 256 * 2


def test_linear_layers_keep_a_state_that_does_not_grow():
    ledger = CacheLedger.of(preset("qwen3-next-80b-a3b-instruct"))
    assert ledger.bytes_per_token == 12 * 2 * 2 * 256 * 2
    # 36 layers: 32 matrices of 128 x 128 in float32, and 3 earlier inputs of the convolution.
    assert ledger.state_bytes == 36 * (32 * 128 * 128 * 4 + 3 * (2 * 16 + 32) * 128 * 2)
    assert ledger.sequence_bytes(1) == ledger.state_bytes + 16 * ledger.bytes_per_token


def test_chunks_and_windows_bound_what_a_layer_keeps():
    chunked = model_of(layer_types=["chunked_attention"] * 4, attention_chunk_size=64)
    ledger = CacheLedger.of(chunked)
    assert ledger.sequence_bytes(10_000) == 64 * ledger.bytes_per_token
    one_in_four = CacheLedger.of(preset("llama-4-scout-17b-16e"))
    assert one_in_four.sequence_bytes(131_072) == (12 * 131_072 + 36 * 8_192) * 2 * 8 * 128 * 2


LLAMA = preset("smollm2-135m")
LEDGER = CacheLedger.of(LLAMA)


@pytest.mark.parametrize(
    "count, message",
    [
        (lambda: LEDGER.sequence_bytes(-1), "num_tokens = -1 must be at least 0"),
        (lambda: LEDGER.most_bytes(0), "num_tokens = 0 must be at least 1"),
        (lambda: LEDGER.largest_context(1 << 30, batch=0), "batch = 0 must be at least 1"),
        (lambda: LEDGER.largest_batch(1 << 30, 0), "num_tokens = 0 must be at least 1"),
        (lambda: LEDGER.crossing_context(1 << 30, -1), "batch = -1 must be at least 1"),
        (lambda: LEDGER.pool_bytes([]), "0 numbers of pages: there are 1 groups"),
        (lambda: weight_bytes(LLAMA, devices=0), "devices = 0 must be at least 1"),
        (lambda: step_weight_bytes(LLAMA, batch=0), "batch = 0 must be at least 1"),
        (lambda: step_seconds(LEDGER, 0.0, num_tokens=1), "bandwidth = 0.0 must be above 0"),
        (lambda: step_seconds(LEDGER, math.nan, num_tokens=1), "bandwidth = nan must be above 0"),
        (lambda: arithmetic_intensity(LEDGER, num_tokens=1, batch=0), "batch = 0 must be at"),
        (lambda: prefill_macs(LLAMA, 1, -1), "cached = -1 must be at least 0"),
        (lambda: decode_macs(LLAMA, -1), "num_tokens = -1 must be at least 0"),
        (lambda: generation_macs(LLAMA, 0, 1, cache=True), "prompt = 0 must be at least 1"),
        (lambda: simulate(LLAMA, 1, 0, cache=False), "new = 0 must be at least 1"),
        (lambda: LLAMA.with_window(0), "window = 0 must be at least 1"),
        (lambda: make_plan(LLAMA, 1 << 30, context=0), "context = 0 must be at least 1"),
        (lambda: make_plan(LLAMA, 1 << 30, context=1, batch=0), "batch = 0 must be at least 1"),
    ],
)
def test_a_number_that_is_none_is_refused_by_name(count, message):
    with pytest.raises(LedgerError, match=f"^{message}"):
        count()


@pytest.mark.parametrize("devices, heads", [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_kv_heads_are_split_or_repeated(devices, heads):
    ledger = CacheLedger.of(preset("llama-3.1-8b"), devices=devices)
    assert ledger.bytes_per_token == 32 * 2 * heads * 128 * 2
    assert weight_bytes(preset("llama-3.1-8b"), devices=devices) == 2 * 8_030_261_248 // devices


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("llama-3.1-8b", {"devices": 3}, "32 query heads do not split over 3 devices"),
        ("llama-3.1-8b", {"devices": 64}, "32 query heads do not split over 64 devices"),
        ("qwen2.5-7b", {"devices": 8}, "28 query heads do not split over 8 devices"),
        ("deepseek-v2-lite", {"devices": 32}, "16 query heads do not split over 32 devices"),
        ("llama-3.2-3b", {"devices": 12}, "8 KV heads do not split over 12 devices"),
        ("llama-3.1-8b", {"devices": 0}, "0 devices"),
        ("llama-3.1-8b", {"page_size": 7}, "page size 7: must be 8 to 256"),
        ("llama-3.1-8b", {"page_size": 257}, "page size 257: must be 8 to 256"),
        ("llama-3.1-8b", {"kv_format": "int3"}, "no KV format 'int3'; there are f32, bf16"),
        ("llama-3.1-8b", {"kv_format": "bf16,99=int8"}, "no layer 99: the model has 32"),
        ("qwen3-next-80b-a3b-instruct", {"devices": 6}, "do not split over 6 devices"),
    ],
)
def test_what_does_not_fit_a_model_is_refused(name, options, message):
    with pytest.raises(JaxkvError, match=message):
        CacheLedger.of(preset(name), **options)


def test_weights_are_counted_as_they_are_stored():
    model = preset("gpt-oss-20b")
    assert weight_bytes(model, "bf16") == 2 * model.parameters
    assert weight_bytes(model, "mxfp4") == -(-model.parameters * 17 // 32)
    with pytest.raises(LedgerError, match="weights of 'int3'"):
        weight_bytes(model, "int3")


def test_a_step_reads_the_experts_that_its_tokens_chose():
    model = preset("mixtral-8x7b-v0.1")
    one, many = (step_weight_bytes(model, batch=batch) for batch in (1, 1_000))
    table = model.embedding  # a step reads only some of its rows
    assert one == 2 * (model.active_parameters - table)
    assert many == 2 * (model.parameters - table)
    dense = preset("llama-2-7b")
    ledger = CacheLedger.of(dense)
    read = weight_bytes(dense) - 2 * dense.embedding + 4 * ledger.sequence_bytes(4_096)
    assert step_seconds(ledger, 1e12, num_tokens=4_096, batch=4) == pytest.approx(read / 1e12)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_fewer_heads_take_their_part_and_smaller_projections(kv_heads):
    model = preset("llama-3.1-8b")
    fewer = model.with_kv_heads(kv_heads)
    whole = CacheLedger.of(model).bytes_per_token
    assert CacheLedger.of(fewer).bytes_per_token * 8 == whole * kv_heads
    assert model.parameters - fewer.parameters == 32 * 4096 * 2 * (8 - kv_heads) * 128


def test_a_window_narrows_the_layers_that_see_more():
    narrow = preset("gemma-3-270m").with_window(1_024)
    limits = [one.mixer.span.limit for one in narrow.layers]
    assert limits == [512] * 5 + [1_024] + [512] * 5 + [1_024] + [512] * 5 + [1_024]


def test_a_plan_proposes_no_page_size_that_the_engine_refuses():
    sizes = (1, PAGE_SIZES[0] - 1, PAGE_SIZES[0], PAGE_SIZES[-1], PAGE_SIZES[-1] + 1)
    plan = make_plan(LLAMA, 1 << 40, context=100, formats=["bf16"], page_sizes=sizes)
    assert {one.page_size for one in plan.options} == {PAGE_SIZES[0], PAGE_SIZES[-1]}
    for one in plan.options:
        EngineConfig(page_size=one.page_size)
    assert plan.notes == tuple(f"page size {n}: must be 8 to 256" for n in (1, 7, 257))


def test_a_page_of_odd_parameters_is_shared_evenly_by_its_tokens():
    model = model_of(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    for page_size, choice in itertools.product((9, 16), ("kivi4", "kivi2")):
        ledger = CacheLedger.of(model, choice, page_size=page_size)
        assert ledger.bytes_per_token * page_size == pytest.approx(ledger.pages[0].bytes_per_page)

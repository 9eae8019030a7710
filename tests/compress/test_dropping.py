"""Engines that drop tokens, compared with a float64 decoder that masks them, and with themselves
under chunks, batches, preemption and cached prefixes."""

from itertools import count

import chex
import jax
import numpy as np
import pytest

from jaxkv.compress import Budget, Compression
from jaxkv.engine import Completion, Request, RequestError
from jaxkv.prefix import pack
from tests.compress.naive_dropping import chooser, decode_dropping
from tests.engine.disturbances import logit_bits, preempt_at
from tests.engine.tiny import CheckedEngine, Tiny, random_prompts, run

(PROMPT,) = random_prompts(100)
CONTEXT, NEW, P = 90, 6, 8
FAST = ("adakv_snapkv",)
METHODS = ("knorm", "keydiff", "tova", "snapkv", "pyramidkv", "adakv_keydiff", "adakv_snapkv")
OBSERVE_ALL = ("h2o", "expected_attention", "adakv_h2o")


def slow_but(fast: tuple[str, ...], names: tuple[str, ...]) -> list:
    return [pytest.param(n, marks=[] if n in fast else [pytest.mark.slow]) for n in names]


def compression(method: str, budget: str = "0.75", interval: int | None = None) -> Compression:
    return Compression(method=method, budget=budget, interval=interval)


def engine_of(
    tiny: Tiny,
    method: str,
    budget: str = "0.75",
    interval: int | None = None,
    kv_format: str = "f32",
    **options,
) -> CheckedEngine:
    options |= dict(page_size=P, kv_format=kv_format)
    return tiny.engine(compression=compression(method, budget, interval), **options)


def asked(**options) -> Request:
    return Request(
        **dict(prompt=PROMPT, max_new_tokens=NEW, context=CONTEXT, keep_logits=True) | options
    )


def watch(engine: CheckedEngine, request: Request) -> tuple[Completion, list]:
    """Serves a request; returns its completion, and what was kept each time it lost tokens."""
    completion, kept = engine.submit(request), []
    (sequence,) = engine._sequences.values()
    while engine.has_work:
        engine.step()
        drop = sequence.drop
        if drop.kept is not None and (not kept or drop.kept is not kept[-1]):
            kept.append(drop.kept)
    return completion, kept


def positions(kept) -> list[list[list[int]]]:
    return [
        [row[:n].tolist() for row, n in zip(layer, counts, strict=True)]
        for layer, counts in zip(kept.positions, kept.counts, strict=True)
    ]


def check_against_naive(tiny: Tiny, method: str) -> None:
    completion, (kept,) = watch(engine_of(tiny, method), asked())
    num_layers = len(kept.counts)
    keep = int(0.75 * CONTEXT)
    budgets = compression(method).score_method().budgets(num_layers, CONTEXT, keep)
    choose = chooser(method, lambda n: keep, budgets)
    tokens = [*PROMPT, *completion.tokens]
    logits, stayed = decode_dropping(tiny.decoder, tokens, [CONTEXT], choose)
    assert positions(kept) == [layer[0] for layer in stayed]
    assert int(kept.counts.sum()) == kept.counts.size * keep
    assert completion.dropped_tokens == CONTEXT - keep
    got, want = np.stack(completion.logits), logits[len(PROMPT) - 1 : -1]
    chex.assert_trees_all_close(got, want, rtol=1e-7, atol=2e-5)
    whole = tiny.logits(tokens)[len(PROMPT) - 1 : -1]
    assert np.abs(got - whole).max() > 1e-3  # something was lost


@pytest.mark.parametrize("method", slow_but(FAST, METHODS))
def test_an_engine_keeps_what_a_naive_decoder_keeps_and_gives_its_logits(mixed: Tiny, method):
    check_against_naive(mixed, method)


@pytest.mark.slow
@pytest.mark.parametrize("method", OBSERVE_ALL)
def test_so_do_methods_that_observe_all_queries(full: Tiny, method):
    check_against_naive(full, method)


@pytest.mark.parametrize(
    "method, budget, interval",
    [
        ("tova", "40", 1),
        pytest.param("keydiff", "0.6", 4, marks=pytest.mark.slow),
        pytest.param("keydiff", "33", 3, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_dropped_again_after_every_so_many(mixed: Tiny, method, budget, interval):
    """Each choice is the naive one of what was left, and what stays is within the budget."""
    n = 16
    completion, kept = watch(
        engine_of(mixed, method, budget, interval), asked(max_new_tokens=n, context=None)
    )
    boundaries = list(range(len(PROMPT), len(PROMPT) + n - 1, interval))
    keep = Budget(budget).keep
    tokens = [*PROMPT, *completion.tokens]
    logits, stayed = decode_dropping(mixed.decoder, tokens, boundaries, chooser(method, keep))
    assert [positions(one) for one in kept] == [list(step) for step in zip(*stayed, strict=True)]
    got, want = np.stack(completion.logits), logits[len(PROMPT) - 1 : -1]
    chex.assert_trees_all_close(got, want, rtol=1e-7, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kv_format, least", [("int4", 25), ("int8", 29)])
def test_scores_are_taken_in_the_basis_of_the_model(mixed: Tiny, kv_format, least):
    """Nearly all of 30 kept tokens are those of a float32 cache, and codes are moved as codes."""
    found = []
    for name in ("f32", kv_format):
        completion, (kept,) = watch(
            engine_of(mixed, "tova", "30", kv_format=name), asked(max_new_tokens=2)
        )
        found.append(positions(kept))
    for ours, theirs in zip(*found, strict=True):
        assert len(set(ours[0]) & set(theirs[0])) >= least
    assert len(completion.tokens) == 2


def bits_of(engine: CheckedEngine, requests: list[Request], disturb=None) -> list[np.ndarray]:
    completions = [engine.submit(request) for request in requests]
    for number in count():
        if not engine.has_work:
            return logit_bits(completions)
        if disturb is not None:
            disturb(engine, number)
        engine.step()
    raise AssertionError


CHOICES = [
    ("knorm", "0.5"),
    pytest.param(("adakv_snapkv", "0.5", 3), marks=pytest.mark.slow),
    pytest.param(("tova", "30", 1), marks=pytest.mark.slow),
    pytest.param(("h2o", "0.5", 4), marks=pytest.mark.slow),
    pytest.param(("expected_attention", "0.5", 4), marks=pytest.mark.slow),
    pytest.param(("random", "0.5", 2), marks=pytest.mark.slow),
    pytest.param(("snapkv", "0.75", 2, "int4"), marks=pytest.mark.slow),
    pytest.param(("adakv_keydiff", "0.5", 3, "int8"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("choice", CHOICES)
def test_chunks_batches_preemption_and_hits_change_no_bit(mixed: Tiny, full: Tiny, choice):
    tiny = full if choice[0] in OBSERVE_ALL else mixed
    others = [Request(prompt=p, max_new_tokens=9, keep_logits=True) for p in random_prompts(70, 33)]
    want = bits_of(engine_of(tiny, *choice, deterministic=True), [asked()])
    (again,) = bits_of(
        engine_of(tiny, *choice, deterministic=True, token_budget=17), [asked(), *others]
    )[:1]
    chex.assert_trees_all_equal(again, want[0])
    engine = engine_of(tiny, *choice, deterministic=True)
    for disturb in (preempt_at(2), preempt_at(4), None):
        chex.assert_trees_all_equal(bits_of(engine, [asked()], disturb)[0], want[0])
    assert engine.metrics.num_preemptions == 2 and engine.metrics.cached_tokens > 80


@pytest.mark.parametrize("method", ["knorm", pytest.param("adakv_knorm", marks=pytest.mark.slow)])
def test_a_budget_of_all_is_bit_for_bit_no_method(mixed: Tiny, method):
    request = asked(prompt_logprobs=True)
    plain = mixed.engine(page_size=P, deterministic=True).generate(
        [asked(prompt_logprobs=True, context=None)]
    )
    all_kept = engine_of(mixed, method, "1.0", 3, deterministic=True).generate([request])
    chex.assert_trees_all_equal(logit_bits(plain)[0], logit_bits(all_kept)[0])
    chex.assert_trees_all_equal(plain[0].prompt_logprobs, all_kept[0].prompt_logprobs)
    assert all_kept[0].dropped_tokens == 0


@pytest.mark.parametrize(
    "cached", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["index", "no index"]
)
@pytest.mark.parametrize("method", ["knorm", pytest.param("adakv_knorm", marks=pytest.mark.slow)])
def test_half_of_the_tokens_take_half_of_the_bytes(full, method, cached):
    engine = engine_of(full, method, "0.5", prefix_cache=cached)
    (prompt,) = random_prompts(240)
    completion = engine.submit(Request(prompt=prompt, max_new_tokens=4))
    held = []
    while engine.has_work:
        engine.step()
        held.append(engine.kv_bytes_held)
    per_token = sum(map(engine.spec.bytes_per_page, range(len(engine.pools)))) / P
    whole, tails = 240 * per_token, per_token * P
    after = held[-2]  # of 120 tokens, and 3 of the answer
    assert after <= 0.52 * whole + tails
    assert engine.metrics.peak_kv_bytes <= whole + tails
    assert after == (tails if method == "knorm" else 0) + 15 * tails or method != "knorm"
    assert completion.dropped_tokens == 120


def test_shared_pages_stay_as_they_are_and_a_second_request_hits_them(mixed: Tiny):
    engine = engine_of(mixed, "knorm", "0.5", deterministic=True)
    first = run(engine, asked())
    assert engine.index is not None
    (group,) = engine.cache.groups_of(0)

    def pages() -> list[np.ndarray]:
        found = engine.index.hold(pack(PROMPT[: CONTEXT - 1]), engine.namespace())
        ids = np.array(found.pages[group] + [found.sources[group]])
        for g, held in enumerate(found.pages):
            engine.pools[g].release([page for page in held if page])
        return [np.asarray(x[ids]) for x in engine.cache.layers[0].paged.values()]

    before = pages()
    (longer,) = random_prompts(20, seed=8)
    second = run(engine, asked(prompt=(*PROMPT[:CONTEXT], *longer)))
    again = run(engine, asked())
    assert (second.cached_tokens, again.cached_tokens) == (CONTEXT, CONTEXT)
    cold = run(
        engine_of(mixed, "knorm", "0.5", deterministic=True),
        asked(prompt=(*PROMPT[:CONTEXT], *longer)),
    )
    for one, other in ((second, cold), (again, first)):
        chex.assert_trees_all_equal(*logit_bits([one, other]))
    jax.tree.map(np.testing.assert_array_equal, before, pages())


def test_protected_tokens_are_never_dropped(mixed: Tiny):
    spans = ((3, 8), (60, 64))
    _, kept = watch(engine_of(mixed, "knorm", "20", 3), asked(protect=spans, max_new_tokens=10))
    assert len(kept) > 2
    for one in kept:
        for heads in positions(one):
            for stay in heads:
                assert {*range(3, 8), *range(60, 64)} <= set(stay) and len(stay) == 20


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pyramidkv", "adakv_pyramidkv"])
@pytest.mark.parametrize("budget", ["50%", "96"])
def test_nor_are_they_where_layers_keep_different_numbers(mixed: Tiny, method, budget):
    (prompt,) = random_prompts(192)
    request = asked(prompt=prompt, context=None, protect=((0, 92),), max_new_tokens=10)
    _, kept = watch(engine_of(mixed, method, budget, 3), request)
    assert len(kept) > 2 and int(kept[0].counts.sum()) == kept[0].counts.size * 96
    for one in kept:
        for heads in positions(one):
            for stay in heads:
                assert set(range(92)) <= set(stay)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["knorm", "pyramidkv", "adakv_knorm", "adakv_pyramidkv"])
def test_prompts_that_nearly_fill_the_pool_lose_tokens_within_it(full: Tiny, method):
    """This holds also if other pages must be evicted, and if two requests alternate."""
    requests = [asked(prompt=p, context=None) for p in random_prompts(96, 103, 96, seed=1)]
    want = logit_bits(engine_of(full, method, deterministic=True).generate(requests))
    for room in (112, 208, 232):
        engine = engine_of(full, method, deterministic=True).squeeze(room)
        for got, bits in zip(logit_bits(engine.generate(requests)), want, strict=True):
            chex.assert_trees_all_equal(got, bits)
        assert engine.metrics.evicted_pages > 10


@pytest.mark.slow
def test_a_request_without_room_because_of_pins_ends_with_the_reason(full: Tiny):
    engine = engine_of(full, "knorm", "0.5", pool_tokens=192, max_sequences=1)
    request = Request(prompt=PROMPT[:96], max_new_tokens=3)
    run(engine, request)
    assert engine.pins is not None and engine.index is not None
    pin = engine.pins.pin(pack(request.prompt), engine.namespace(), ttl_seconds=3600)
    for group, pool in enumerate(engine.pools):
        engine.index.evict(group, pool.num_cached)  # what was left of it the first time
    engine.squeeze(2 * P)
    refused = run(engine, request)
    assert refused.finish_reason == "error" and "no pages for what is left" in str(refused.error)
    engine.pins.unpin(pin)
    assert run(engine, request).finish_reason == "length"


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(context=0), "context must be 1 to the prompt's 100, got 0"),
        (dict(context=101), "context must be 1 to"),
        (dict(protect=((80, 95),)), "spans .* of the context"),
        (dict(protect=((5, 3),)), "spans .* of the context"),
        (dict(protect=((0, 50),)), "protect has 50 tokens; the budget 0.5 keeps 45 of 90"),
    ],
)
def test_what_cannot_be_kept_is_refused(mixed: Tiny, options, message):
    with pytest.raises(RequestError, match=message):
        engine_of(mixed, "knorm", "0.5").submit(asked(**options))


@pytest.mark.parametrize("method", [None, "streaming_llm", "sliding_window"])
@pytest.mark.parametrize("asked_for", [dict(context=9), dict(protect=((0, 4),))])
def test_an_engine_that_scores_no_token_takes_no_context(mixed: Tiny, method, asked_for):
    engine = mixed.engine() if method is None else engine_of(mixed, method, "20")
    with pytest.raises(RequestError, match="need an engine with a score method"):
        engine.submit(Request(prompt=PROMPT, **asked_for))


@pytest.mark.parametrize(
    "method, budget, kv_format, message",
    [
        ("knorm", "0.5", "kivi4", "knorm does not go with format kivi4"),
        ("streaming_llm", "20", "kivi2_r9", "streaming_llm does not go with format kivi2_r9"),
        ("h2o", "0.5", "f32", "h2o does not go with layers that have a window"),
    ],
)
def test_pairs_that_do_not_go_together_are_named(mixed: Tiny, method, budget, kv_format, message):
    with pytest.raises(ValueError, match=message):
        engine_of(mixed, method, budget, kv_format=kv_format)


@pytest.mark.parametrize("method", ["streaming_llm", "knorm", "pyramidkv", "adakv_knorm"])
def test_layers_that_have_a_window_take_any_format_with_any_method(mixed: Tiny, method):
    spec = engine_of(mixed, method, "20", kv_format="int8,window=kivi4").spec
    assert [one.name for one in spec.formats] == ["int8", "kivi4", "int8"]

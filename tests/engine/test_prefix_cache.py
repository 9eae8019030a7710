"""Requests that share prefixes: hits, forks, beams, namespaces, aborts, windows and events."""

from dataclasses import replace
from itertools import count

import chex
import numpy as np
import pytest
from flax import nnx

from jaxkv.engine import Engine, EngineConfig, Request, RequestError, SamplingParams, beam_search
from jaxkv.models.decoder import Decoder
from jaxkv.prefix import pack
from jaxkv.prefix.events import replay
from tests.engine.disturbances import preempt_at
from tests.engine.tiny import TINY, Tiny, decode_model, random_prompts, run


@pytest.mark.parametrize("page_size", [8, 64])
def test_a_hit_is_token_exact_and_leaves_one_token_to_compute(tiny: Tiny, page_size):
    engine = tiny.engine(page_size=page_size)
    (prompt,) = random_prompts(53)
    first = run(engine, Request(prompt=prompt, max_new_tokens=4))
    assert (first.cached_tokens, first.computed_tokens) == (0, 53 + 3)
    again = run(engine, Request(prompt=prompt, max_new_tokens=4))
    assert again.tokens == first.tokens
    assert (again.cached_tokens, again.computed_tokens) == (52, 1 + 3)
    longer = prompt + tuple(first.tokens) + (5, 6)
    turn = run(engine, Request(prompt=longer, max_new_tokens=4))
    assert turn.cached_tokens == 53 + 3  # the last token of an answer is never computed
    assert turn.tokens == tiny.greedy(longer, 4)
    parted = run(engine, Request(prompt=prompt[:29] + (96,) * 9, max_new_tokens=2))
    assert parted.cached_tokens == 29
    metrics = engine.metrics
    assert metrics.prompt_tokens == 2 * len(prompt) + len(longer) + 38
    assert metrics.cached_tokens == 52 + 56 + 29


def test_equal_prompts_of_one_step_are_computed_once(tiny: Tiny):
    engine = tiny.engine(page_size=8)
    (prompt,) = random_prompts(60)
    completions = engine.generate([Request(prompt=prompt, max_new_tokens=3)] * 4)
    assert [c.tokens for c in completions] == [tiny.greedy(prompt, 3)] * 4
    assert sorted(c.computed_tokens for c in completions) == [3, 3, 3, 62]
    shared, tails = 7, 4  # whole pages of the prompt, and of each sequence the rest of it
    assert engine.metrics.peak_kv_bytes <= sum(
        (shared + 2 * tails) * engine.spec.bytes_per_page(g) for g in range(2)
    )


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_n_answers_take_the_pages_of_one_prompt_and_their_tails(tiny: Tiny, prefix_cache):
    engine = tiny.engine(page_size=8, prefix_cache=prefix_cache)
    (prompt,) = random_prompts(61)
    sampling = dict(temperature=1.0, seed=11)
    asked = Request(prompt=prompt, max_new_tokens=8, n=4, sampling=SamplingParams(**sampling))
    first = engine.submit(asked)
    most_held = 0
    while engine.has_work:
        engine.step()
        most_held = max(most_held, engine.held_pages[1])  # of the group without a window
    whole, tails = 61 // 8, 4 * 2
    assert most_held == whole + tails
    answers = [first.tokens, *(sample.tokens for sample in first.samples)]
    assert len({tuple(tokens) for tokens in answers}) > 1
    for i, tokens in enumerate(answers):
        alone = tiny.engine(prefix_cache=False)
        one = Request(
            prompt=prompt, max_new_tokens=8, sampling=SamplingParams(temperature=1.0, seed=11 + i)
        )
        assert run(alone, one).tokens == tokens
    assert sum(c.computed_tokens for c in (first, *first.samples)) == 61 + 7 + 3 * (1 + 7)


@pytest.mark.parametrize("config", [{}, dict(prefix_cache=False), dict(max_sequences=2)], ids=str)
def test_beam_search_finds_what_a_search_over_full_recomputes_finds(tiny: Tiny, config):
    (prompt,) = random_prompts(21, seed=8)
    width, length = 3, 5

    def logprobs(tokens: tuple[int, ...]) -> np.ndarray:
        row = tiny.logits([*prompt, *tokens])[-1]
        return row - np.log(np.exp(row - row.max()).sum()) - row.max()

    beams = [((), 0.0)]
    for _ in range(length):
        grown = [
            ((*tokens, t), score + float(p))
            for tokens, score in beams
            for t, p in enumerate(logprobs(tokens))
        ]
        beams = sorted(grown, key=lambda pair: -pair[1])[:width]
    engine = tiny.engine(page_size=8, **config)
    found = beam_search(engine, Request(prompt=prompt, max_new_tokens=length), width=width)
    assert [beam.tokens for beam in found] == [tokens for tokens, _ in beams]
    chex.assert_trees_all_close(
        np.array([b.logprob for b in found]), np.array([s for _, s in beams]), rtol=1e-7, atol=1e-4
    )
    assert not engine.has_work


def test_beam_search_ends_beams_at_stop_ids(tiny: Tiny):
    (prompt,) = random_prompts(21, seed=8)
    best = tiny.greedy(prompt, 3)
    asked = Request(prompt=prompt, max_new_tokens=6, stop_ids=frozenset([best[2]]))
    found = beam_search(tiny.engine(), asked, width=2, length_penalty=0.0)
    assert any(beam.finished and beam.tokens[-1] == best[2] for beam in found)
    with pytest.raises(RequestError, match="width must be 1 to 10"):
        beam_search(tiny.engine(), asked, width=11)


@pytest.mark.parametrize(
    "first, second, shared",
    [
        pytest.param({}, {}, True, id="bare"),
        pytest.param(dict(cache_salt="a"), dict(cache_salt="a"), True, id="one salt"),
        pytest.param(dict(cache_salt="a"), dict(cache_salt="b"), False, id="two salts"),
        pytest.param(dict(cache_salt="a"), {}, False, id="salt and none"),
    ],
)
def test_prefixes_are_shared_within_a_namespace_alone(tiny: Tiny, first, second, shared):
    engine = tiny.engine()
    (prompt,) = random_prompts(40)
    run(engine, Request(prompt=prompt, max_new_tokens=2, **first))
    hit = run(engine, Request(prompt=prompt, max_new_tokens=2, **second)).cached_tokens
    assert hit == (39 if shared else 0)


def test_a_request_for_prompt_logprobs_computes_its_prompt_and_caches_it(tiny: Tiny):
    engine = tiny.engine()
    (prompt,) = random_prompts(40)
    asked = Request(prompt=prompt, max_new_tokens=2, prompt_logprobs=True)
    first, second = run(engine, asked), run(engine, asked)
    assert second.cached_tokens == 0
    assert second.prompt_logprobs is not None and first.prompt_logprobs is not None
    chex.assert_trees_all_close(
        second.prompt_logprobs[1:], first.prompt_logprobs[1:], rtol=1e-7, atol=1e-5
    )
    assert run(engine, Request(prompt=prompt, max_new_tokens=2)).cached_tokens == 39


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 5])
def test_an_abort_in_any_state_releases_all_pages(tiny: Tiny, steps):
    engine = tiny.engine(token_budget=20, page_size=8)
    prompts = random_prompts(50, 30)
    completions = [engine.submit(Request(prompt=p, max_new_tokens=3, n=2)) for p in prompts]
    for _ in range(steps):
        engine.step()
    for completion in completions:
        for one in (completion, *completion.samples):
            engine.abort(one.request_id)
            engine.abort(one.request_id)
    assert not engine.has_work and engine.held_pages == [0, 0]
    engine.reset_cache()
    assert [state.cached for state in engine.pool_states] == [0, 0]
    assert all(
        sum(state) == pool.capacity
        for state, pool in zip(engine.pool_states, engine.pools, strict=True)
    )


def test_a_reset_is_refused_while_anything_runs(tiny: Tiny):
    engine = tiny.engine()
    engine.submit(Request(prompt=(1, 2, 3), max_new_tokens=4))
    engine.step()
    with pytest.raises(ValueError, match="pages are in use"):
        engine.reset_cache()
    while engine.has_work:
        engine.step()
    engine.reset_cache()


def test_a_preempted_sequence_continues_from_its_cached_part(tiny: Tiny):
    engine = tiny.engine(page_size=8)
    (prompt,) = random_prompts(50)
    completion = engine.submit(Request(prompt=prompt, max_new_tokens=8))
    for number in count():
        if not engine.has_work:
            break
        preempt_at(4)(engine, number)
        engine.step()
    assert completion.tokens == tiny.greedy(prompt, 8)
    assert engine.metrics.num_preemptions == 1
    assert completion.computed_tokens == 50 + 7  # all of it was still cached


def test_pages_before_the_window_are_freed_while_a_sequence_runs(tiny: Tiny):
    engine = tiny.engine(page_size=8, token_budget=16)
    (prompt,) = random_prompts(200)
    engine.submit(Request(prompt=prompt, max_new_tokens=4))
    held = []
    while engine.has_work:
        engine.step()
        held.append(engine.held_pages)
    # A window of 12 and a chunk of 16 touch 5 pages of 8 at most; the other group keeps all 26.
    assert max(windowed for windowed, _ in held) <= 5
    assert max(full for _, full in held) == 26
    again = run(engine, Request(prompt=prompt, max_new_tokens=4))
    assert again.cached_tokens == 199


def test_the_events_of_an_engine_rebuild_its_index(tiny: Tiny):
    events = []
    engine = Engine(
        tiny.model,
        EngineConfig(pool_tokens=256, token_budget=64, page_size=8),
        page_events=events.append,
    )
    for prompt in random_prompts(90, 40, 90, 130, seed=4):
        run(engine, Request(prompt=prompt, max_new_tokens=4))
    assert engine.index is not None and engine.metrics.evicted_pages
    assert replay(events) == engine.index.stored()


def test_a_request_that_can_never_fit_names_the_longest_that_would(tiny: Tiny):
    engine = tiny.engine(pool_tokens=64)
    with pytest.raises(RequestError, match="the prompt has 65 tokens; the longest that fits is 63"):
        engine.submit(Request(prompt=(1,) * 65))


def test_a_probe_finds_what_a_request_would_and_changes_nothing(tiny: Tiny):
    engine = tiny.engine()
    (prompt,) = random_prompts(40)
    run(engine, Request(prompt=prompt, max_new_tokens=2))
    assert engine.index is not None
    before = list(engine.index.order.policy._order)
    assert engine.index.probe(pack(prompt[:30]), engine.namespace()) == 30
    assert list(engine.index.order.policy._order) == before


@pytest.mark.parametrize("pinned_pages", [0, 2])
def test_a_request_that_finds_no_room_ends_with_the_reason_and_who_holds_what(
    tiny: Tiny, pinned_pages
):
    engine = tiny.engine(page_size=8, pool_tokens=64)
    large, small, system = (
        Request(prompt=p, max_new_tokens=2) for p in random_prompts(50, 20, 8 * pinned_pages + 1)
    )
    run(engine, system)
    assert engine.pins is not None and engine.index is not None
    pin = engine.pins.pin(
        pack(system.prompt[: 8 * pinned_pages]), engine.namespace(), ttl_seconds=3600
    )
    for group, pool in enumerate(engine.pools):
        engine.index.evict(group, pool.num_cached)
    engine.squeeze(32)
    refused, served = engine.generate([large, small])
    assert refused.finish_reason == "error"
    assert refused.error == (
        "50 tokens need more pages than are left: "
        f"of 8 pages 4 are held, {pinned_pages} of them by pins"
    )
    assert served.tokens == tiny.greedy(small.prompt, 2)
    engine.pins.unpin(pin)


@pytest.mark.slow
def test_where_every_layer_slides_a_sequence_may_be_longer_than_the_pool(tiny: Tiny):
    layers = tuple(replace(layer, window=12) for layer in TINY.layers)
    model = decode_model(Decoder(replace(TINY, layers=layers), rngs=nnx.Rngs(0)))
    options = EngineConfig(max_sequences=1, token_budget=16, page_size=8)
    engine = Engine(model, options)
    (prompt,) = random_prompts(200)
    assert engine.pools[0].capacity * 8 < len(prompt) < engine.max_length == TINY.max_positions
    found = run(engine, Request(prompt=prompt, max_new_tokens=4))
    whole = Engine(model, replace(options, token_budget=256, prefix_cache=False))
    assert found.tokens == run(whole, Request(prompt=prompt, max_new_tokens=4)).tokens
    assert run(engine, Request(prompt=prompt, max_new_tokens=4)).cached_tokens == 199


def test_a_pinned_prefix_is_never_evicted(tiny: Tiny):
    engine = tiny.engine(page_size=8, pool_tokens=128)
    system, *others = random_prompts(33, 100, 90, 110, seed=9)
    run(engine, Request(prompt=system, max_new_tokens=1))
    assert engine.index is not None and engine.pins is not None
    pin = engine.pins.pin(pack(system), engine.namespace(), ttl_seconds=3600)
    for prompt in others:
        asked = Request(prompt=prompt[:80], max_new_tokens=2)
        assert run(engine, asked).tokens == tiny.greedy(asked.prompt, 2)
    assert engine.index.probe(pack(system), engine.namespace()) == len(system)
    with pytest.raises(ValueError, match="pages are in use"):
        engine.reset_cache()
    engine.pins.unpin(pin)
    engine.reset_cache()


def test_a_stepwise_request_waits_for_the_token_to_go_on_with(tiny: Tiny):
    engine = tiny.engine()
    (prompt,) = random_prompts(20)
    asked = Request(prompt=prompt, max_new_tokens=3)
    with pytest.raises(RequestError, match="one answer"):
        engine.submit(replace(asked, n=2), stepwise=True)
    completion = engine.submit(asked, stepwise=True)
    with pytest.raises(RequestError, match="does not wait"):
        engine.resume(completion.request_id, 5)
    for _ in range(3):
        engine.step()
    assert len(completion.tokens) == 1
    with pytest.raises(RequestError, match="token id 97 is outside"):
        engine.fork(completion.request_id, last_token=97)
    assert len(engine._sequences) == 1
    branch = engine.fork(completion.request_id, last_token=7)
    engine.resume(completion.request_id, 5)
    engine.step()
    for one, token in ((completion, 5), (branch, 7)):
        assert one.tokens == [token, *tiny.greedy((*prompt, token), 1)]
        engine.abort(one.request_id)

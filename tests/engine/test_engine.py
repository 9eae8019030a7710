"""Requests in every state: limits, aborts, streams, log-probabilities, and pages that come back."""

import chex
import jax
import numpy as np
import pytest

from jaxkv.engine import (
    Delta,
    FinishReason,
    Request,
    RequestError,
    SamplingParams,
)
from tests.engine.tiny import MAX_POSITIONS, BytesDetokenizer, Tiny, V, random_prompts, run

PROMPTS = random_prompts(5, 23, 70, 9, seed=1)
HOT = SamplingParams(temperature=3.0, seed=5)


def request(prompt: tuple[int, ...], n: int = 6, **options) -> Request:
    return Request(prompt=prompt, max_new_tokens=n, **options)


def step_until(engine, holds) -> list[Delta]:
    deltas = []
    for _ in range(200):
        if holds():
            return deltas
        deltas += engine.step()
    raise AssertionError("it never came about")


@pytest.mark.parametrize("state", ["queued", "in the middle of its prompt", "decoding", "finished"])
def test_an_abort_in_any_state_frees_the_pages_and_leaves_the_others_alone(tiny: Tiny, state):
    engine = tiny.engine(token_budget=16)
    first = engine.submit(request(PROMPTS[0], 30))
    victim = engine.submit(request(PROMPTS[2], 4))
    last = engine.submit(request(PROMPTS[3]))
    sequence = engine._sequences[victim.request_id]
    if state == "in the middle of its prompt":
        step_until(engine, lambda: sequence.num_computed >= 16)
        assert sequence.num_uncomputed > 1
    if state == "decoding":
        step_until(engine, lambda: len(victim.tokens) == 2)
    if state == "finished":
        step_until(engine, lambda: victim.finish_reason is not None)
    tokens = list(victim.tokens)
    for _ in range(2):  # the second time changes nothing
        engine.abort(victim.request_id)
        assert victim.finish_reason == ("length" if state == "finished" else "abort")
        assert sequence.row is None
    step_until(engine, lambda: not engine.has_work)
    assert victim.tokens == tokens
    assert first.tokens == tiny.greedy(PROMPTS[0], 30)
    assert last.tokens == tiny.greedy(PROMPTS[3], 6)
    assert engine.held_pages == [0, 0]


def test_an_abort_of_an_unknown_request_does_nothing(tiny: Tiny):
    tiny.engine().abort(77)


def test_leaving_a_stream_early_aborts_what_is_unfinished(tiny: Tiny):
    engine = tiny.engine()
    other = engine.submit(request(PROMPTS[3]))
    seen = {}
    stream = engine.stream([request(PROMPTS[0]), request(PROMPTS[1], 50)])
    for delta in stream:
        seen[delta.completion.request_id] = delta.completion
        if delta.completion is not other and delta.completion.finish_reason is not None:
            break
    assert [seen[i].finish_reason for i in (1, 2)] == ["length", None]
    stream.close()  # as happens with its last reference
    assert [seen[i].finish_reason for i in (1, 2)] == ["length", "abort"]
    step_until(engine, lambda: not engine.has_work)
    assert other.tokens == tiny.greedy(PROMPTS[3], 6)
    assert engine.held_pages == [0, 0]


def test_requests_may_come_while_others_run(tiny: Tiny):
    engine = tiny.engine()
    completions = []
    for prompt in PROMPTS:
        completions.append(engine.submit(request(prompt)))
        engine.step()
        engine.step()
    step_until(engine, lambda: not engine.has_work)
    assert [c.tokens for c in completions] == [tiny.greedy(p, 6) for p in PROMPTS]
    assert engine.step() == []


@pytest.mark.parametrize(
    "bad, message",
    [
        pytest.param(dict(prompt=()), "the prompt is empty", id="empty"),
        pytest.param(dict(prompt="abc"), "prompt must be a sequence of integers", id="text"),
        pytest.param(dict(prompt=None), "prompt must be a sequence of integers", id="none"),
        pytest.param(dict(prompt=(5.5,)), "prompt must be a sequence of integers", id="fraction"),
        pytest.param(dict(prompt=[True]), "prompt must be a sequence of integers", id="bool"),
        pytest.param(dict(max_new_tokens=-1), "max_new_tokens must be 0 or more", id="negative n"),
        pytest.param(dict(max_new_tokens=None), "max_new_tokens must be int", id="no limit"),
        pytest.param(dict(stop_ids=["a"]), "stop_ids must be a sequence of int", id="stop text"),
        pytest.param(dict(stop_strings=("a", "")), "a stop string is empty", id="empty stop"),
        pytest.param(dict(stop_strings="ab"), "stop_strings must be a sequence", id="one text"),
        pytest.param(dict(stop_strings=[1]), "stop_strings must be a sequence", id="stop number"),
        pytest.param(dict(logprobs=1.5), "logprobs must be", id="logprobs of half a token"),
        pytest.param(dict(sampling=None), "sampling must be SamplingParams", id="no sampling"),
        pytest.param(dict(keep_logits="no"), "keep_logits must be True or False", id="a word"),
        pytest.param(dict(logprobs=21), "logprobs must be 0 to 20, got 21", id="logprobs"),
        pytest.param(dict(logprobs=-1), "logprobs must be 0 to 20", id="negative logprobs"),
        pytest.param(dict(n=0), "n must be 1 to 256, got 0", id="no answer"),
        pytest.param(dict(protect=(3,)), "protect must be spans", id="no span"),
    ],
)
def test_a_request_that_means_nothing_cannot_be_made(bad, message):
    with pytest.raises(RequestError, match=message):
        Request(**{"prompt": (1,), **bad})


def test_a_sampling_parameter_of_a_wrong_type_is_named():
    with pytest.raises(RequestError, match="temperature must be"):
        SamplingParams(temperature="1")
    with pytest.raises(RequestError, match="top_k must be int"):
        SamplingParams(top_k=2.5)


@pytest.mark.parametrize("prompt", [[1, 2], np.array([1, 2], np.int32), range(1, 3)], ids=str)
def test_a_request_takes_any_sequence_of_integers(prompt):
    asked = Request(prompt=prompt, stop_ids=np.array([4, 4]), stop_strings=["a"], protect=[[0, 1]])
    assert asked == Request(
        prompt=(1, 2), stop_ids=frozenset({4}), stop_strings=("a",), protect=((0, 1),)
    )
    assert all(type(token) is int for token in asked.prompt)


@pytest.mark.parametrize(
    "bad, message",
    [
        pytest.param(dict(prompt=(3, -1)), "token id -1 is outside the vocabulary", id="negative"),
        pytest.param(dict(prompt=(V,)), f"token id {V} is outside", id="too large"),
        pytest.param(dict(stop_ids=[V]), f"token id {V} is outside", id="stop id"),
        pytest.param(dict(stop_strings=("a",)), "a detokenizer", id="stop without text"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(tiny: Tiny, bad, message):
    engine = tiny.engine()
    with pytest.raises(RequestError, match=message):
        engine.submit(Request(**{"prompt": (1,), **bad}))
    assert not engine.has_work


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_sequences", 0),
        ("token_budget", 0),
        ("pool_bytes", 0),
        ("pool_tokens", 0),
        ("max_length", 0),
        ("page_size", 7),
        ("page_size", 257),
        ("kv_format", 8),
        ("kv_format", None),
        ("kv_ranges", 2.5),
        ("compression", "snapkv"),
        ("compression", 0.5),
        ("deterministic", 1),
        ("prefix_cache", None),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_name(tiny: Tiny, field, value):
    with pytest.raises(ValueError, match=f"{field} must be .*, got {value!r}"):
        tiny.engine(**{field: value})


LIMITS = pytest.mark.parametrize(
    "config, longest",
    [
        pytest.param({}, MAX_POSITIONS, id="model"),
        pytest.param(dict(pool_tokens=50), 64, id="pool, in whole pages"),
        pytest.param(dict(max_length=37), 37, id="max_length"),
    ],
)


@LIMITS
def test_a_prompt_one_over_the_limit_is_refused_with_the_limit(tiny: Tiny, config, longest):
    engine = tiny.engine(**config)
    assert engine.max_length == longest
    engine.submit(request((1,) * longest, 0))
    engine.submit(request((1,) * (longest - 1), 1))
    with pytest.raises(RequestError, match=f"has {longest + 1} tokens; the longest .* {longest} "):
        engine.submit(request((1,) * (longest + 1), 0))
    with pytest.raises(RequestError, match=f"has {longest} tokens; the longest .* {longest - 1} "):
        engine.submit(request((1,) * longest, 1))


def test_a_sequence_may_fill_the_pool_and_grows_no_further(tiny: Tiny):
    engine = tiny.engine(pool_tokens=64, deterministic=True)
    prompts = random_prompts(64, 63, 60, 57)
    asked, answered = (0, 5, 5, 5), (0, 1, 4, 5)
    completions = engine.generate(map(request, prompts, asked))
    assert all(c.finish_reason == "length" for c in completions)
    assert [c.tokens for c in completions] == list(map(tiny.greedy, prompts, answered))
    # The first filled all pages but the null pages, and ended in the step in which it held them.
    null_pages = sum(engine.spec.bytes_per_page(group) for group in (0, 1))
    assert engine.metrics.peak_kv_bytes == engine.spec.nbytes - null_pages


def test_the_default_pool_holds_all_sequences_at_their_longest(tiny: Tiny):
    engine = tiny.engine(max_sequences=3, max_length=70, page_size=64, pool_tokens=None)
    assert engine.pools[0].capacity == 6


def test_no_new_tokens_computes_the_prompt_alone(tiny: Tiny):
    engine = tiny.engine()
    (completion,) = engine.generate([request(PROMPTS[1], 0, prompt_logprobs=True, logprobs=2)])
    assert (completion.tokens, completion.logprobs) == ([], [])
    assert completion.finish_reason == FinishReason.LENGTH
    chex.assert_trees_all_close(
        completion.prompt_logprobs, oracle_prompt_logprobs(tiny, PROMPTS[1]), rtol=1e-7, atol=1e-4
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def oracle_prompt_logprobs(tiny: Tiny, prompt: tuple[int, ...]) -> np.ndarray:
    logprobs = log_softmax(tiny.logits(list(prompt)))
    return np.array([np.nan, *(logprobs[i, token] for i, token in enumerate(prompt[1:]))])


@pytest.mark.parametrize(
    "token_budget, pool_tokens",
    [
        pytest.param(64, None, id="chunks of 64"),
        pytest.param(7, None, id="chunks of 7"),
        pytest.param(64, 96, id="preempted"),
        pytest.param(11, 96, id="chunks of 11, preempted"),
    ],
)
def test_prompt_logprobs_are_those_of_a_full_recompute(tiny: Tiny, token_budget, pool_tokens):
    prompts = [*PROMPTS, *random_prompts(1, 16, seed=2)]
    engine = tiny.engine(token_budget=token_budget)
    if pool_tokens:
        engine.squeeze(pool_tokens)
    wanted = [i != 1 for i in range(len(prompts))]
    completions = engine.generate(
        [request(p, 20, prompt_logprobs=want) for p, want in zip(prompts, wanted, strict=True)]
    )
    assert (engine.metrics.num_preemptions > 0) == bool(pool_tokens)
    for prompt, want, completion in zip(prompts, wanted, completions, strict=True):
        assert completion.tokens == tiny.greedy(prompt, 20)
        if not want:
            assert completion.prompt_logprobs is None
            continue
        got = completion.prompt_logprobs
        assert got.dtype == np.float32
        assert got.shape == (len(prompt),)
        chex.assert_trees_all_close(got, oracle_prompt_logprobs(tiny, prompt), rtol=1e-7, atol=1e-4)


def test_prompt_logprobs_cost_nothing_once_the_prompt_is_computed(tiny: Tiny):
    engine = tiny.engine()
    run(engine, request(PROMPTS[1], 12, prompt_logprobs=True))
    assert engine.steps.prompt_logprobs_calls == 1


def test_logprobs_are_the_log_softmax_of_the_kept_logits(tiny: Tiny):
    prompt = PROMPTS[1]
    completion = run(tiny.engine(), request(prompt, 8, sampling=HOT, logprobs=20, keep_logits=True))
    assert len(completion.logprobs) == len(completion.logits) == len(completion.tokens) == 8
    naive = tiny.logits([*prompt, *completion.tokens])
    for i, (entry, logits) in enumerate(zip(completion.logprobs, completion.logits, strict=True)):
        assert logits.shape == (V,)
        chex.assert_trees_all_close(logits, naive[len(prompt) - 1 + i], rtol=1e-7, atol=1e-4)
        logprobs = log_softmax(logits)
        assert entry.token == completion.tokens[i]
        assert entry.logprob == pytest.approx(logprobs[entry.token], abs=1e-5)
        order = np.argsort(-logits, kind="stable")[:20]
        assert [token for token, _ in entry.top] == order.tolist()
        chex.assert_trees_all_close(
            np.array([p for _, p in entry.top]), logprobs[order], rtol=1e-7, atol=1e-5
        )


@pytest.mark.parametrize("n", [None, 0, 3])
def test_as_many_top_tokens_are_reported_as_were_asked_for(tiny: Tiny, n):
    engine = tiny.engine()
    asked = [request(PROMPTS[0], 2, logprobs=n), request(PROMPTS[1], 2, logprobs=5)]
    (completion, _) = engine.generate(asked)
    assert [len(entry.top) for entry in completion.logprobs] == ([] if n is None else [n, n])


def test_a_seed_gives_the_same_tokens_whatever_the_batch(tiny: Tiny):
    sampling = [
        SamplingParams(temperature=2.0, seed=1),
        SamplingParams(temperature=2.0, seed=1, top_k=20, repetition_penalty=1.3),
        SamplingParams(temperature=1.5, seed=2, top_p=0.9, min_p=0.01),
        SamplingParams(),
    ]
    asked = [request(p, 12, sampling=s) for p, s in zip(PROMPTS, sampling, strict=True)]
    engine = tiny.engine()
    together = [c.tokens for c in engine.generate(asked)]
    assert [run(engine, r).tokens for r in asked] == together
    small = tiny.engine().squeeze(96)
    assert [c.tokens for c in small.generate(asked[::-1])][::-1] == together
    assert small.metrics.num_preemptions > 0


def test_different_seeds_give_different_answers(tiny: Tiny):
    asked = [
        request(PROMPTS[0], 12, sampling=SamplingParams(temperature=2.0, seed=s)) for s in range(8)
    ]
    answers = {tuple(c.tokens) for c in tiny.engine().generate(asked)}
    assert len(answers) == 8


def test_a_repetition_penalty_counts_prompt_and_answer(tiny: Tiny):
    prompt = PROMPTS[0]
    sampling = SamplingParams(repetition_penalty=1.8)
    completion = run(tiny.engine(), request(prompt, 25, sampling=sampling, keep_logits=True))
    tokens = list(prompt)
    for token, logits in zip(completion.tokens, completion.logits, strict=True):
        punished = logits.copy()
        for seen in set(tokens):
            punished[seen] *= 1 / 1.8 if punished[seen] > 0 else 1.8
        assert token == punished.argmax()
        tokens.append(token)
    assert completion.tokens != tiny.greedy(prompt, 25)


def test_a_stop_id_ends_the_answer_and_is_its_last_token(tiny: Tiny):
    want = tiny.greedy(PROMPTS[1], 12)
    stop = want[5]
    at = want.index(stop)
    engine = tiny.engine(detokenizer=BytesDetokenizer)
    completion = run(engine, request(PROMPTS[1], 12, stop_ids=frozenset({stop, 96 - stop})))
    first = next(i for i, t in enumerate(want) if t in (stop, 96 - stop))
    assert first <= at
    assert completion.tokens == want[: first + 1]
    assert completion.text == BytesDetokenizer.text(want[:first])
    assert completion.finish_reason == FinishReason.STOP


def test_a_stop_id_does_not_stop_in_the_prompt(tiny: Tiny):
    stops = frozenset(PROMPTS[0]) - set(tiny.greedy(PROMPTS[0], 4))
    assert len(run(tiny.engine(), request(PROMPTS[0], 4, stop_ids=stops)).tokens) == 4


def test_streamed_text_is_the_text_and_holds_no_stop_string(tiny: Tiny):
    """Stops are cut from the answers themselves, so that they cross tokens and characters."""
    engine = tiny.engine(detokenizer=BytesDetokenizer)
    free = [
        run(engine, request(p, 30, sampling=SamplingParams(temperature=3.0, seed=s)))
        for s, p in enumerate(PROMPTS)
    ]
    for completion in free:
        assert completion.text == BytesDetokenizer.text(completion.tokens)
        assert len(completion.tokens) == 30
    rng = np.random.default_rng(0)
    asked, texts = [], []
    for _ in range(6):
        for s, (prompt, completion) in enumerate(zip(PROMPTS, free, strict=True)):
            at, n = rng.integers(0, len(completion.text) - 6), rng.integers(2, 6)
            stop = completion.text[at : at + n]
            stops = (stop + "zz", stop, "zz")
            sampling = SamplingParams(temperature=3.0, seed=s)
            asked.append(request(prompt, 30, sampling=sampling, stop_strings=stops))
            texts.append(completion.text[: completion.text.index(stop)])
    streamed = {}
    tokens: dict[int, tuple[int, ...]] = {}
    for delta in engine.stream(asked):
        key = delta.completion.request_id
        streamed[key] = streamed.get(key, "") + delta.text
        tokens[key] = tokens.get(key, ()) + delta.tokens
        completion = delta.completion
        assert completion.text == streamed[key]
        assert list(tokens[key]) == completion.tokens
        assert not any(stop in completion.text for stop in asked[key - 4].stop_strings)
    assert [streamed[key] for key in sorted(streamed)] == texts
    assert engine.held_pages == [0, 0]


def test_a_held_back_beginning_of_a_stop_comes_with_the_last_token(tiny: Tiny):
    engine = tiny.engine(detokenizer=BytesDetokenizer)
    want = BytesDetokenizer.text(tiny.greedy(PROMPTS[0], 6))
    deltas = list(engine.stream([request(PROMPTS[0], 6, stop_strings=(want + "never",))]))
    assert [delta.text for delta in deltas] == [*[""] * 5, want]
    assert deltas[-1].completion.finish_reason == FinishReason.LENGTH


def test_memory_does_not_grow_while_decoding(tiny: Tiny):
    engine = tiny.engine()
    for prompt in PROMPTS:
        engine.submit(request(prompt, 80))
    step_until(engine, lambda: all(s.num_uncomputed == 1 for s in engine._sequences.values()))
    engine.step()
    before = len(jax.live_arrays())
    old = engine.cache
    for _ in range(50):
        engine.step()
        assert len(jax.live_arrays()) <= before
    assert all(pages.kv.is_deleted() for pages in old.layers)
    assert engine.has_work


def test_every_completion_is_timed_and_counted(tiny: Tiny):
    engine = tiny.engine()
    completions = engine.generate([request(p) for p in PROMPTS])
    assert all(c.first_token_seconds > 0 for c in completions)
    metrics = engine.metrics
    assert metrics.prefill_tokens + metrics.decode_tokens == sum(map(len, PROMPTS)) + 4 * 5
    assert metrics.generated_tokens == 24
    assert metrics.step_shapes == len(engine.steps.shapes)

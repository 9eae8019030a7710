"""Several users of one engine by turns: each stream yields its own requests, whole."""

import pytest

from jaxkv.engine import FinishReason, Request
from jaxkv.engine.request import SamplingParams
from tests.engine.tiny import Tiny

PROMPTS = [(1, 2, 3), (4, 5), (6, 7, 8, 9), (10,)]


def requests(prompts: list[tuple[int, ...]]) -> list[Request]:
    return [Request(prompt=prompt, max_new_tokens=5) for prompt in prompts]


def test_streams_by_turns_yield_their_own_tokens_and_all_of_them(tiny: Tiny):
    alone = [completion.tokens for completion in tiny.engine().generate(requests(PROMPTS))]
    engine = tiny.engine()
    streams = [engine.stream(requests(PROMPTS[:2])), engine.stream(requests(PROMPTS[2:]))]
    seen: list[dict[int, list[int]]] = [{}, {}]
    open_streams = [0, 1]
    while open_streams:
        for which in list(open_streams):
            delta = next(streams[which], None)
            if delta is None:
                open_streams.remove(which)
            else:
                tokens = seen[which].setdefault(delta.completion.request_id, [])
                tokens.extend(delta.tokens)
    assert [list(part.values()) for part in seen] == [alone[:2], alone[2:]]
    assert all(pool.num_held == 0 for pool in engine.pools)


def test_a_stream_omits_requests_that_were_submitted_separately(tiny: Tiny):
    engine = tiny.engine()
    other = engine.submit(requests(PROMPTS)[3])
    deltas = list(engine.stream(requests(PROMPTS[:1])))
    assert {delta.completion.request_id for delta in deltas} == {other.request_id + 1}
    while engine.has_work:
        engine.step()
    assert len(other.tokens) == 5


def test_generate_returns_the_completions_of_its_own_requests(tiny: Tiny):
    engine = tiny.engine()
    other = engine.submit(requests(PROMPTS)[3])
    completions = engine.generate(requests(PROMPTS[:2]))
    assert [completion.prompt_tokens for completion in completions] == [3, 2]
    assert other not in completions


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        pytest.param({"prompt": (1, 97)}, "token id 97 is outside", id="no token"),
        pytest.param({"prompt": (1,) * 300}, "the prompt has 300 tokens", id="too long"),
        pytest.param({"stop_strings": ["a"]}, "a detokenizer", id="stop without text"),
        pytest.param({"context": 1}, "need an engine with a score method", id="context"),
    ],
)
def test_a_request_that_an_engine_cannot_serve_fails_alone(tiny: Tiny, bad, message):
    good = Request(prompt=(1, 2, 3), max_new_tokens=2)
    wrong = Request(**{"prompt": (1,), "max_new_tokens": 2} | bad)
    refused, served = tiny.engine().generate([wrong, good])
    assert refused.finish_reason is FinishReason.ERROR
    assert message in str(refused.error) and "\n" not in str(refused.error)
    assert len(served.tokens) == 2


def test_requests_that_cannot_all_be_read_are_aborted(tiny: Tiny):
    engine = tiny.engine()

    def asked():
        yield from requests(PROMPTS[:2])
        raise OSError("the rest is lost")

    with pytest.raises(OSError, match="the rest is lost"):
        engine.generate(asked())
    assert not engine.has_work


def test_further_answers_are_streamed_and_served_to_their_end(tiny: Tiny):
    sampling = SamplingParams(temperature=1.0, seed=5)
    asked = Request(prompt=PROMPTS[2], max_new_tokens=5, n=3, sampling=sampling)
    engine = tiny.engine()
    (first,) = engine.generate([asked])
    answers = [first.tokens, *(sample.tokens for sample in first.samples)]
    assert [len(tokens) for tokens in answers] == [5, 5, 5]
    streamed: dict[int, list[int]] = {}
    for delta in engine.stream([asked]):
        streamed.setdefault(delta.completion.request_id, []).extend(delta.tokens)
    assert [tokens for _, tokens in sorted(streamed.items())] == answers

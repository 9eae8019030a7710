"""`jaxkv.LLM` and the names of `import jaxkv`: the tokens of the engine, one line for an error."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import LLM, Engine, EngineConfig, Request, SamplingParams, llm, memory
from jaxkv.cache import get_format
from jaxkv.engine import FinishReason, RequestError
from jaxkv.errors import JaxkvError, UsageError
from jaxkv.models.errors import ModelError
from jaxkv.models.loading import LoadedModel, load_model
from tests.cli.test_conversation import CHATML
from tests.models.tiny_checkpoint import write_hf

CONFIG = {"max_sequences": 3, "token_budget": 32, "pool_tokens": 1024}
PROMPTS = ["the one", "a much longer second prompt", "x"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> LoadedModel:
    found = load_model(str(write_hf(tmp_path_factory.mktemp("llm") / "model")))
    return replace(found, tokenizer=replace(found.require_tokenizer(), chat_template=CHATML))


@pytest.fixture(scope="module")
def tiny(loaded) -> LLM:
    return LLM(loaded, **CONFIG)


@pytest.fixture(scope="module")
def expected(loaded) -> list[list[int]]:
    """Returns the engine's answers to PROMPTS."""
    tokenizer = loaded.require_tokenizer()
    requests = [
        Request(prompt=tuple(tokenizer.encode(p)), max_new_tokens=6, stop_ids=tokenizer.stop_ids)
        for p in PROMPTS
    ]
    engine = Engine(loaded.model, EngineConfig(**CONFIG))
    return [completion.tokens for completion in engine.generate(requests)]


def test_one_prompt_gives_one_answer_and_a_list_gives_a_list(tiny, expected):
    assert tiny.generate(PROMPTS[0], max_new_tokens=6).tokens == expected[0]
    answers = tiny.generate(PROMPTS, max_new_tokens=6)
    assert [answer.tokens for answer in answers] == expected
    decode = tiny.tokenizer.decode
    assert [answer.text for answer in answers] == [decode(tokens) for tokens in expected]
    assert tiny.generate([]) == []


@pytest.mark.parametrize("kind", [list, tuple, np.array], ids=["list", "tuple", "array"])
def test_a_prompt_may_be_token_ids(tiny, expected, kind):
    ids = [kind(tiny.tokenizer.encode(prompt)) for prompt in PROMPTS]
    assert tiny.generate(ids[0], max_new_tokens=6).tokens == expected[0]
    assert [a.tokens for a in tiny.generate(ids, max_new_tokens=6)] == expected


def test_a_stream_yields_the_text_of_the_answers(tiny, expected):
    texts = [tiny.tokenizer.decode(tokens) for tokens in expected]
    assert "".join(tiny.stream(PROMPTS[1], max_new_tokens=6)) == texts[1]
    streamed = [""] * len(PROMPTS)
    for number, text in tiny.stream(PROMPTS, max_new_tokens=6):
        streamed[number] += text
    assert streamed == texts


def test_two_streams_may_be_open_and_one_that_is_left_early_holds_no_page(tiny, expected):
    one, two = (tiny.stream(prompt, max_new_tokens=6) for prompt in PROMPTS[:2])
    first, second = next(one), next(two)
    first += "".join(one)
    assert first == tiny.tokenizer.decode(expected[0])
    two.close()
    assert not tiny.engine.has_work
    assert [pool.held for pool in tiny.engine.pool_states] == [0]
    assert tiny.tokenizer.decode(expected[1]).startswith(second)


def test_lists_do_where_the_engine_takes_tuples_and_sets(tiny, expected):
    options = {"stop_ids": [expected[0][2]], "stop_strings": ["zzz"], "protect": []}
    answer = tiny.generate(PROMPTS[0], max_new_tokens=6, **options)
    assert answer.tokens == expected[0][: expected[0].index(expected[0][2]) + 1]
    assert answer.finish_reason is FinishReason.STOP
    assert tiny.request("the", stop_strings="the").stop_strings == ("the",)


def test_the_ends_of_a_turn_stop_an_answer_unless_others_are_given(tiny):
    assert tiny.request("the").stop_ids == tiny.tokenizer.stop_ids != frozenset()
    assert tiny.request("the", stop_ids=[]).stop_ids == frozenset()


def test_prompt_i_draws_with_a_seed_of_its_own(tiny):
    params = SamplingParams(temperature=2.0, seed=5)
    together = tiny.generate(["the"] * 3, params, max_new_tokens=8)
    apart = [tiny.generate("the", replace(params, seed=5 + i), max_new_tokens=8) for i in range(3)]
    assert [a.tokens for a in together] == [a.tokens for a in apart]
    assert together[0].tokens != together[1].tokens
    given = tiny.generate(["the"] * 2, [params, params], max_new_tokens=8)
    assert given[0].tokens == given[1].tokens == together[0].tokens
    with pytest.raises(UsageError, match="2 SamplingParams were given for 1 prompts"):
        tiny.generate(["the"], [params, params])


def test_several_answers_come_as_samples(tiny):
    answer = tiny.generate("the", SamplingParams(temperature=2.0), max_new_tokens=5, n=3)
    assert len({tuple(a.tokens) for a in (answer, *answer.samples)}) == 3
    with pytest.raises(UsageError, match="one answer per prompt"):
        tiny.stream("the", n=2)


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ("", {}, ModelError, "the text to encode is empty"),
        (["the", ""], {}, ModelError, "prompt 1: the text to encode is empty"),
        (["the", "x" * 400], {}, RequestError, "prompt 1: the prompt has 400 tokens"),
        ([[5], [300]], {}, RequestError, "prompt 1: token id 300 is outside the vocabulary"),
        ([3.5], {}, RequestError, "prompt must be a sequence of integers, got .3.5."),
        ("the", {"max_new_tokens": -1}, RequestError, "max_new_tokens must be 0 or more"),
        ("the", {"context": 1}, RequestError, "context"),
    ],
)
def test_a_refused_prompt_is_one_line_and_nothing_is_served(tiny, prompts, options, error, message):
    steps = tiny.engine.metrics.num_steps
    with pytest.raises(error, match=message) as raised:
        tiny.generate(prompts, **options)
    assert isinstance(raised.value, JaxkvError)
    assert len(str(raised.value).splitlines()) == 1
    assert not tiny.engine.has_work
    assert tiny.engine.metrics.num_steps == steps


def test_a_chat_that_goes_on_finds_all_that_was_computed(loaded):
    model = LLM(loaded, **CONFIG)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "the one"}]
    pieces: list[str] = []
    answer = model.chat(messages, max_new_tokens=7, on_text=pieces.append)
    assert "".join(pieces) == answer.text
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "b"}]
    again = model.chat(messages, max_new_tokens=7)
    assert again.cached_tokens == answer.prompt_tokens + len(answer.tokens) - 1
    assert model.chat(messages, max_new_tokens=7).tokens == again.tokens  # another branch of it


def test_a_chat_that_was_not_held_here_is_rendered_whole(tiny):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    answer = tiny.chat(messages, max_new_tokens=2)
    rendered = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    ids = tiny.tokenizer.encode(rendered + "<|im_start|>assistant\n", add_special_tokens=False)
    assert answer.tokens == tiny.generate(ids, max_new_tokens=2).tokens
    assert answer.prompt_tokens == len(ids)


@pytest.mark.parametrize(
    "messages", [[], [{"role": "user"}], ["text"], [{"role": "assistant", "content": "b"}]]
)
def test_messages_that_cannot_be_answered_are_refused(tiny, messages):
    with pytest.raises(UsageError):
        tiny.chat(messages)


def test_the_pool_has_a_share_of_the_free_memory_and_no_more_than_is_needed(loaded, monkeypatch):
    def pool(free: int, **options) -> int:
        monkeypatch.setattr(llm, "free_memory", lambda device: free)
        with LLM(loaded, **{"max_sequences": 2, "max_length": 64, **options}) as model:
            return model.engine.spec.nbytes

    all_of_it = pool(1 << 40)
    per_page = all_of_it // (2 * 64 // 16 + 1)
    assert all_of_it == 9 * per_page  # two sequences of four pages, and the null page
    assert pool(10 * per_page) == 5 * per_page
    assert pool(10 * per_page, memory_share=0.7) == 7 * per_page
    assert pool(1 << 40, pool_tokens=32) == 3 * per_page
    assert pool(1 << 40, pool_bytes=4 * per_page) == 4 * per_page


def test_free_memory_is_what_the_device_says_or_the_machine_has(tmp_path):
    stats = {"bytes_limit": 100, "bytes_in_use": 30}
    gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    assert memory.free_memory(gpu) == 70
    assert memory.free_memory(jax.devices("cpu")[0]) > 1 << 20
    (tmp_path / "meminfo").write_text("MemTotal: 8 kB\nMemAvailable:   5 kB\n")
    assert memory.free_main_memory(tmp_path / "meminfo") == 5 * 1024
    assert memory.free_main_memory(tmp_path / "absent") > 1 << 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_share": 0}, "memory_share must be above 0"),
        ({"kv_format": "int3"}, "no KV format 'int3'"),
        ({"max_sequences": 0}, "max_sequences must be at least 1"),
        ({"page_size": 7}, "page_size must be"),
    ],
)
def test_an_option_that_cannot_be_used_is_one_line(loaded, options, message):
    with pytest.raises(UsageError, match=message) as raised:
        LLM(loaded, **options)
    assert len(str(raised.value).splitlines()) == 1


def test_the_page_size_suits_the_format_unless_it_is_given(loaded):
    with LLM(loaded, kv_format="kivi4", **CONFIG) as model:
        assert model.engine.config.page_size == 32
    with LLM(loaded, page_size=8, **CONFIG) as model:
        assert model.engine.config.page_size == 8


def test_a_format_may_be_an_object(loaded):
    own = LLM(loaded, **CONFIG, kv_format=get_format("int8"))
    named = LLM(loaded, **CONFIG, kv_format="int8")
    assert own.engine.spec == named.engine.spec
    with pytest.raises(UsageError, match=r"kv_format must be .*, got 3"):
        LLM(loaded, **CONFIG, kv_format=3)


def test_a_chat_has_one_answer(tiny):
    with pytest.raises(UsageError, match="n must be 1 in a chat, got 3"):
        tiny.chat([{"role": "user", "content": "x"}], n=3)


def test_after_the_with_block_calls_say_that_it_is_closed(loaded):
    with LLM(loaded, **CONFIG) as model:
        assert model.loaded is loaded
    with pytest.raises(UsageError, match="this LLM was closed"):
        model.generate("the")


def test_every_public_name_is_there_and_no_other():
    assert all(getattr(jaxkv, name) is not None for name in jaxkv.__all__)
    assert set(jaxkv.__all__) <= set(dir(jaxkv))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        jaxkv.Nothing  # noqa: B018


@pytest.mark.parametrize("module", ["jaxkv", "jaxkv.ledger", "jaxkv.prefix", "jaxkv.replay"])
def test_modules_without_arrays_do_not_load_jax(module):
    program = f"import sys, {module}; assert 'jax' not in sys.modules; print(jaxkv.__version__)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().count(".") == 2

"""`jaxkv.conversation` and `jaxkv.cli.talk`: histories as token ids, and what turns reuse."""

from dataclasses import replace
from pathlib import Path

import pytest

from jaxkv.cli.talk import Talker
from jaxkv.conversation import Conversation
from jaxkv.engine import Request, RequestError
from jaxkv.llm import LLM
from jaxkv.models.errors import ModelError
from jaxkv.models.loading import LoadedModel, load_model
from jaxkv.models.tokenizer import Tokenizer
from tests.models.tiny_checkpoint import write_hf

# As SmolLM2's own, and in the manner of Gemma's: it names the assistant "model", trims what is
# said, and puts the system message into the first turn of the user.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA_LIKE = (
    "{{ bos_token }}"
    "{% set s = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
    "{% if loop.first %}{{ s }}{% endif %}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
TEMPLATES = pytest.mark.parametrize("template", [CHATML, GEMMA_LIKE], ids=["chatml", "gemma"])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> LoadedModel:
    return load_model(str(write_hf(tmp_path_factory.mktemp("conversation") / "model")))


@pytest.fixture
def tokenizer(loaded) -> Tokenizer:
    return replace(loaded.require_tokenizer(), chat_template=CHATML)


def say(talk: Conversation, text: str, answer: list[int]) -> Conversation:
    """The conversation after a turn with this answer."""
    return talk.answered(text, talk.prompt(text), answer, talk.tokenizer.decode(answer))


def render(template: str, *contents: str, system: str) -> str:
    from jaxkv.models.chat import render_chat

    roles = ["user", "assistant"] * len(contents)
    said = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return render_chat(template, [{"role": "system", "content": system}, *said])


@TEMPLATES
def test_a_history_in_ids_has_the_text_that_the_template_renders_of_it(tokenizer, template):
    tokenizer = replace(tokenizer, chat_template=template)
    talk = Conversation(tokenizer).with_system("Be brief.")
    said = ["What is it?", "The one.", "And the other?", "Gone.", "Why?"]
    for question, answer in zip(said[0:4:2], said[1:4:2], strict=True):
        talk = say(talk, question, tokenizer.encode(answer))
    prompt = talk.prompt(said[-1])
    assert tokenizer.decode(prompt, skip_special_tokens=False) == render(
        template, *said, system="Be brief."
    )


@TEMPLATES
def test_the_next_prompt_begins_with_the_very_tokens_that_were_generated(tokenizer, template):
    # " the" is one token, but the model may write it letter by letter, and a space at the end.
    tokenizer = replace(tokenizer, chat_template=template)
    letters = [tokenizer.encode(c)[0] for c in " the "]
    assert tokenizer.encode(" the ") != letters
    talk = Conversation(tokenizer)
    first = talk.prompt("Say it.")
    talk = say(talk, "Say it.", letters)
    second = talk.prompt("Again.")
    assert second[: len(first) + len(letters)] == first + letters
    assert talk.tokens == (*first, *letters)


def test_the_token_that_ended_an_answer_is_written_by_the_template_alone(tokenizer):
    stop = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert set(stop) <= tokenizer.stop_ids
    talk = say(Conversation(tokenizer), "a", [*tokenizer.encode("b"), *stop])
    text = tokenizer.decode(talk.prompt("c"), skip_special_tokens=False)
    assert "b<|im_end|>\n<|im_start|>user\nc" in text


def test_a_user_may_type_what_marks_the_place_of_an_answer(tokenizer):
    text = "private \ue000 use \ue000\ue000"
    talk = say(Conversation(tokenizer), text, tokenizer.encode("b"))
    assert tokenizer.decode(talk.prompt(text)).count(text) == 2


def test_a_model_without_a_template_gets_a_transcript_a_line_each(tokenizer):
    tokenizer = replace(tokenizer, chat_template=None)
    talk = Conversation(tokenizer).with_system("Be brief.")
    assert talk.stop_strings == ("\n",)
    talk = say(say(talk, "a", tokenizer.encode(" b\n")), "c", tokenizer.encode(" d"))
    assert tokenizer.decode(talk.prompt("e")) == (
        "Be brief.\n\nUser: a\nAssistant: b\nUser: c\nAssistant: d\nUser: e\nAssistant:"
    )


def test_a_template_that_leaves_answers_out_is_refused(tokenizer):
    talk = Conversation(replace(tokenizer, chat_template="{{ messages[0].content }}"))
    talk = say(talk, "a", tokenizer.encode("b"))
    with pytest.raises(ModelError, match="does not suit conversations"):
        talk.prompt("c")


@pytest.mark.parametrize("page_size", [8, 64])
def test_a_turn_hits_all_that_the_turn_before_it_computed(loaded, tokenizer, page_size):
    config = dict(max_sequences=1, token_budget=64, page_size=page_size, pool_tokens=256)
    talker = Talker(LLM(loaded, **config), compare=True)
    talk = Conversation(tokenizer)
    computed = 0
    for text in ("the one", "two", "three"):
        prompt = talk.prompt(text)
        request = Request(prompt=tuple(prompt), max_new_tokens=7)
        shown: list[str] = []
        completion, turn = talker.say(request, shown.append)
        assert (turn.prompt_tokens, turn.cached_tokens) == (len(prompt), computed)
        assert turn.recomputed_tokens == len(prompt) - computed
        assert turn.generated_tokens == len(completion.tokens) == 7
        assert "".join(shown) == completion.text
        assert turn.uncached_seconds is not None
        (pages,) = turn.pools
        assert pages.held == -(-(len(prompt) + 5) // page_size)  # as the last step began
        assert sum(pages) == 256 // page_size
        talk = talk.answered(text, prompt, completion.tokens, completion.text)
        computed = len(prompt) + 6


def test_a_prompt_without_room_for_an_answer_is_refused(loaded):
    llm = LLM(loaded, max_sequences=1, token_budget=64, pool_tokens=32)
    talker = Talker(llm, compare=False)
    with pytest.raises(RequestError, match=r"32 tokens and 32 fit.*/reset"):
        talker.say(Request(prompt=(1,) * 32), str)
    completion, turn = talker.say(Request(prompt=(1,) * 31, max_new_tokens=5), str)
    assert len(completion.tokens) == turn.generated_tokens == 1
    assert turn.uncached_seconds is None


@pytest.mark.slow
def test_after_the_warm_up_nothing_is_cached_and_no_shape_is_new(loaded):
    batch = 3
    llm = LLM(loaded, max_sequences=batch, token_budget=100, pool_tokens=2048)
    llm.warm_up()
    engine = llm.engine
    assert [pool.cached for pool in engine.pool_states] == [0]
    before = engine.metrics.step_shapes
    lengths = (1, 3, 63, 65, 130, 199, 201, 240)
    for n in range(1, batch + 1):
        prompts = [(i,) * length for i, length in enumerate(lengths[:n])]
        engine.generate([Request(prompt=prompt, max_new_tokens=3) for prompt in prompts])
    for length in lengths:
        engine.generate([Request(prompt=(99,) * length, max_new_tokens=2)])
    assert engine.metrics.step_shapes == before


@pytest.mark.slow
def test_with_smollm2_a_turn_hits_all_that_the_turn_before_it_computed(smollm2):
    tokenizer = smollm2.require_tokenizer()
    talker = Talker(LLM(smollm2, max_sequences=1, pool_tokens=512), compare=False)
    talk, computed = Conversation(tokenizer).with_system("Answer in a few words."), 0
    for text in ("What is the capital of France?", "And of Italy?", "Which is larger?"):
        prompt = talk.prompt(text)
        request = Request(prompt=tuple(prompt), max_new_tokens=24, stop_ids=tokenizer.stop_ids)
        completion, turn = talker.say(request, str)
        assert turn.cached_tokens == computed
        talk = talk.answered(text, prompt, completion.tokens, completion.text)
        computed = len(prompt) + len(completion.tokens) - 1


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    from jaxkv.models.pretrained import RELEASES, cache_dir

    name = "smollm2-135m"
    if not (Path(cache_dir()) / "models" / name / RELEASES[name].file).exists():
        pytest.skip(f"{name} has not been fetched: `make demo` does")
    return load_model(name)

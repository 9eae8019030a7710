"""`jaxkv.cli.conversation`: histories as token ids, and what turns take from the cache."""

from dataclasses import replace
from pathlib import Path

import pytest

from jaxkv.cli.arguments.serving import make_engine
from jaxkv.cli.conversation import Conversation, Talker
from jaxkv.engine import Completion, EngineConfig, Request, RequestError
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


def answered(tokenizer: Tokenizer, tokens: list[int]) -> Completion:
    return Completion(0, 1, tokens=tokens, text=tokenizer.decode(tokens))


def render(template: str, *contents: str, system: str) -> str:
    from jaxkv.models.chat import render_chat

    roles = ["user", "assistant"] * len(contents)
    said = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return render_chat(template, [{"role": "system", "content": system}, *said])


@TEMPLATES
def test_a_history_in_ids_has_the_text_that_the_template_renders_of_it(tokenizer, template):
    tokenizer = replace(tokenizer, chat_template=template)
    talk = Conversation(tokenizer, "Be brief.")
    said = ["What is it?", "The one.", "And the other?", "Gone.", "Why?"]
    for question, answer in zip(said[0:4:2], said[1:4:2], strict=True):
        talk.add(question, talk.prompt(question), answered(tokenizer, tokenizer.encode(answer)))
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
    talk.add("Say it.", first, answered(tokenizer, letters))
    second = talk.prompt("Again.")
    assert second[: len(first) + len(letters)] == first + letters
    assert talk.tokens == first + letters


def test_the_token_that_ended_an_answer_is_written_by_the_template_alone(tokenizer):
    stop = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert set(stop) <= tokenizer.stop_ids
    talk = Conversation(tokenizer)
    talk.add("a", talk.prompt("a"), answered(tokenizer, [*tokenizer.encode("b"), *stop]))
    text = tokenizer.decode(talk.prompt("c"), skip_special_tokens=False)
    assert "b<|im_end|>\n<|im_start|>user\nc" in text


def test_a_user_may_type_what_marks_the_place_of_an_answer(tokenizer):
    talk = Conversation(tokenizer)
    text = "private \ue000 use \ue000\ue000"
    talk.add(text, talk.prompt(text), answered(tokenizer, tokenizer.encode("b")))
    assert tokenizer.decode(talk.prompt(text)).count(text) == 2


def test_a_model_without_a_template_gets_a_transcript_a_line_each(tokenizer):
    tokenizer = replace(tokenizer, chat_template=None)
    talk = Conversation(tokenizer, "Be brief.")
    assert talk.stop_strings == ("\n",)
    talk.add("a", talk.prompt("a"), answered(tokenizer, tokenizer.encode(" b\n")))
    talk.add("c", talk.prompt("c"), answered(tokenizer, tokenizer.encode(" d")))
    assert tokenizer.decode(talk.prompt("e")) == (
        "Be brief.\n\nUser: a\nAssistant: b\nUser: c\nAssistant: d\nUser: e\nAssistant:"
    )


def test_a_template_that_leaves_answers_out_is_refused(tokenizer):
    talk = Conversation(replace(tokenizer, chat_template="{{ messages[0].content }}"))
    talk.add("a", talk.prompt("a"), answered(tokenizer, tokenizer.encode("b")))
    with pytest.raises(ModelError, match="none for conversations"):
        talk.prompt("c")


@pytest.mark.parametrize("page_size", [8, 64])
def test_a_turn_hits_all_that_the_turn_before_it_computed(loaded, tokenizer, page_size):
    config = EngineConfig(max_sequences=1, token_budget=64, page_size=page_size, pool_tokens=256)
    talker = Talker(loaded, config, compare=True)
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
        talk.add(text, prompt, completion)
        computed = len(prompt) + 6


def test_a_prompt_without_room_for_an_answer_is_refused_and_the_next_one_is_served(loaded):
    talker = Talker(
        loaded, EngineConfig(max_sequences=1, token_budget=64, pool_tokens=32), compare=False
    )
    with pytest.raises(RequestError, match=r"32 tokens and 32 fit.*/reset"):
        talker.say(Request(prompt=(1,) * 32), str)
    completion, turn = talker.say(Request(prompt=(1,) * 31, max_new_tokens=5), str)
    assert len(completion.tokens) == turn.generated_tokens == 1
    assert turn.uncached_seconds is None


@pytest.mark.slow
def test_after_the_warm_up_nothing_is_cached_and_no_shape_is_new(loaded):
    batch = 3
    config = EngineConfig(max_sequences=batch, token_budget=100, pool_tokens=2048)
    engine = make_engine(loaded, config)
    engine.warm_up()
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
    config = EngineConfig(max_sequences=1, pool_tokens=512)
    talker = Talker(smollm2, config, compare=False)
    talk, computed = Conversation(tokenizer, "Answer in a few words."), 0
    for text in ("What is the capital of France?", "And of Italy?", "Which is larger?"):
        prompt = talk.prompt(text)
        request = Request(prompt=tuple(prompt), max_new_tokens=24, stop_ids=tokenizer.stop_ids)
        completion, turn = talker.say(request, str)
        assert turn.cached_tokens == computed
        talk.add(text, prompt, completion)
        computed = len(prompt) + len(completion.tokens) - 1


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    from jaxkv.models.pretrained import RELEASES, cache_dir

    name = "smollm2-135m"
    if not (Path(cache_dir()) / "models" / name / RELEASES[name].file).exists():
        pytest.skip(f"{name} has not been fetched: `make demo` does")
    return load_model(name)

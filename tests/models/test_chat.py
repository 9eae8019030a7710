"""Chat templates render as the models' own library renders them, and stay in their sandbox."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from jaxkv.models.chat import render_chat
from jaxkv.models.checkpoints.gguf_file import open_gguf
from jaxkv.models.errors import ModelError
from jaxkv.models.tokenizer import tokenizer_from_gguf

USER = {"role": "user", "content": "Explain what a hash table is in two sentences."}

# Written for this test, in the manner of Gemma's own: the assistant is called "model", the system
# message joins the first turn, and the roles have to alternate.
GEMMA_LIKE = """\
{{ bos_token }}
{%- if messages[0].role == 'system' -%}
    {%- set first = messages[0].content + '\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set first = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for turn in turns -%}
    {%- if (turn.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Roles must alternate') }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if turn.role == 'assistant' else turn.role) }}
{{ (first if loop.first else '') + turn.content | trim }}<end_of_turn>
{% endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""


def test_the_smollm2_chat_case_is_rendered_from_its_one_message(
    data: Path, smollm2_path: Path
) -> None:
    cases = json.loads((data / "smollm2.json").read_text("utf-8"))["cases"]
    template = tokenizer_from_gguf(open_gguf(smollm2_path).metadata).chat_template
    assert render_chat(template, [USER]) == cases["chat_1turn"]["text"]


def test_the_gemma_chat_case_is_rendered_from_its_one_message(data: Path) -> None:
    cases = json.loads((data / "gemma3.json").read_text("utf-8"))["cases"]
    assert render_chat(GEMMA_LIKE, [USER]) == cases["chat_1turn"]["text"]


def test_a_whole_conversation_renders_with_bos_system_and_both_roles() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "Hello."},
    ]
    assert render_chat(GEMMA_LIKE, messages, bos_token="<bos>", add_generation_prompt=False) == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n"
        "<start_of_turn>model\nHello.<end_of_turn>\n"
    )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc", id="block-whitespace"),
        pytest.param("a\n", "a", id="last-newline"),
        pytest.param("{{ {'q': '<é>&'} | tojson }}", '{"q": "<é>&"}', id="json-not-for-html"),
        pytest.param("{{ [1] | tojson(indent=2) }}", "[\n  1\n]", id="json-indent"),
        pytest.param("{{ strftime_now('%d %b %Y') }}", "02 Jan 2026", id="date"),
        pytest.param(
            "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "01",
            id="break",
        ),
        pytest.param("{% generation %}x{{ eos_token }}{% endgeneration %}y", "x</s>y", id="mask"),
        pytest.param("{{ thinking }}{{ nothing_of_that_name }}", "True", id="variables"),
        pytest.param("{% if tools %}{{ tools[0].name }}{% endif %}", "add", id="tools"),
        pytest.param("{{ documents is none }}", "True", id="documents"),
    ],
)
def test_templates_find_the_environment_they_are_written_for(template: str, expected: str) -> None:
    rendered = render_chat(
        template,
        [USER],
        eos_token="</s>",
        tools=[{"name": "add"}],
        variables={"thinking": True},
        now=lambda: datetime(2026, 1, 2),
    )
    assert rendered == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__closure__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
    ],
)
def test_a_template_that_leaves_its_sandbox_is_stopped(template: str) -> None:
    messages = [dict(USER)]
    with pytest.raises(ModelError, match=r"\Athe chat template is unsafe and was stopped: .+\Z"):
        render_chat(template, messages)
    assert messages == [USER]


@pytest.mark.parametrize(
    ("template", "messages", "problem"),
    [
        pytest.param(None, [USER], "the model has no chat template", id="no-template"),
        pytest.param("\n{% if %}", [USER], "malformed at line 2", id="syntax"),
        pytest.param("{% for m in messages %}", [USER], "malformed at line 1", id="unclosed"),
        pytest.param("{% include 'x' %}", [USER], "fails", id="include"),
        pytest.param("{{ 1 / 0 }}", [USER], "ZeroDivisionError", id="arithmetic"),
        pytest.param("{{ messages[0].a.b }}", [USER], "UndefinedError", id="undefined"),
        pytest.param("{{ range(10 ** 9) | list }}", [USER], "OverflowError", id="endless"),
        pytest.param(
            GEMMA_LIKE, [USER, USER], "refuses these messages: Roles must alternate", id="refused"
        ),
        pytest.param("x", [], "no messages", id="no-messages"),
        pytest.param("x", ["hi"], "message 0 is 'hi'", id="message-not-object"),
        pytest.param("x", [USER, {"content": "hi"}], "message 1 has no role", id="no-role"),
        pytest.param("x", [{"role": "user"}], r"message 0 \(user\) has no content", id="empty"),
    ],
)
def test_what_cannot_be_rendered_is_one_clear_line(
    template: str | None, messages: list, problem: str
) -> None:
    with pytest.raises(ModelError, match=problem) as caught:
        render_chat(template, messages)
    assert "\n" not in str(caught.value)


def test_a_message_may_hold_tool_calls_or_parts_in_place_of_text() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
        {"role": "assistant", "tool_calls": [{"name": "add"}]},
    ]
    template = "{{ messages[0].content[0].text }} {{ messages[1].tool_calls[0].name }}"
    assert render_chat(template, messages) == "2+2? add"

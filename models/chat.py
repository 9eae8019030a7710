"""Chat templates: they make messages into prompt text of the form that a model was trained on.

A template is Jinja source that comes with the weights. It is not trusted, so it runs in Jinja's
sandbox. The environment is that of Hugging Face's `apply_chat_template`, for which templates are
written. The caller tokenizes the text, with `add_special_tokens=False` since templates write their
own BOS.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxkv.models.errors import ModelError

Message = Mapping[str, Any]


def render_chat(
    template: str | None,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    now: Callable[[], datetime] = datetime.now,
) -> str:
    """Renders a conversation.

    Args:
      template: Jinja source, as in `Tokenizer.chat_template`.
      messages: at least one; each has a `role`, and `content` or `tool_calls`.
      add_generation_prompt: whether the text ends with the start of the assistant's turn.
      bos_token: text that the template may put first.
      eos_token: text that the template may put after a turn.
      tools: JSON schemas of functions that the model may call.
      variables: other variables that the template reads, such as `enable_thinking`.
      now: returns the time, for templates that write the date.

    Raises:
      ModelError: there is no template, a message is malformed, or the template is malformed,
        refuses the messages, or uses what the sandbox forbids.
    """
    if template is None:
        raise ModelError("the model has no chat template; give it plain text, or pass a template")
    _check_messages(messages)
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, LoopControlExtension]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    values = {
        **(variables or {}),
        "messages": messages,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    try:
        return environment.from_string(template).render(values)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"the chat template is malformed at line {error.lineno}: {_line(error)}"
        ) from None
    except SecurityError as error:
        raise ModelError(f"the chat template is unsafe and was stopped: {_line(error)}") from None
    except _Refused as error:
        raise ModelError(f"the chat template refuses these messages: {_line(error)}") from None
    except Exception as error:  # a template is a program: it can fail in any way
        raise ModelError(
            f"the chat template fails on these messages: {type(error).__name__}: {_line(error)}"
        ) from None


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise ModelError("the conversation has no messages; give at least one")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ModelError(f"message {index} is {message!r:.40}, not an object with a role")
        if not isinstance(message.get("role"), str):
            raise ModelError(f"message {index} has no role; give it one, such as 'user'")
        content = message.get("content")
        if content is None and "tool_calls" in message:
            continue
        if not isinstance(content, str | list):
            raise ModelError(f"message {index} ({message['role']}) has no content; give it text")


class _Refused(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox that stops at a forbidden attribute; Jinja's own would write nothing for it."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"it asks for {attribute!r} of a {type(obj).__name__}")


class _GenerationBlock(Extension):
    """Writes the body of `{% generation %}`, which marks the assistant's words for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes plain JSON; Jinja's own filter escapes it for HTML, unlike what models have seen."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())

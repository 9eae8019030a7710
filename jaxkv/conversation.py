"""A conversation as token ids, so that each turn finds the turns before it in the prefix cache.

A chat template renders a whole conversation as text. The text of an answer, encoded again, need not
give the tokens that the model generated, and the prefix cache compares token ids: it would miss
from there on. So the ids of prompts and answers are kept as they are, and only the text that the
template puts between one answer and the next is rendered and encoded. This also keeps hits where a
template trims answers or leaves out the thinking of earlier turns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Self

from jaxkv.models.chat import render_chat
from jaxkv.models.errors import ModelError
from jaxkv.models.tokenizer import Tokenizer

Message = Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Conversation:
    """What was said so far. `answered` returns a longer conversation; nothing is changed in place.

    A model without a chat template gets a plain transcript, in which a line break ends an answer.

    Example:
      >>> talk = Conversation(tokenizer).with_system("Be brief.")
      >>> prompt = talk.prompt("What is a page?")
      >>> talk = talk.answered("What is a page?", prompt, answer_ids, answer_text)

    Attributes:
      tokenizer: the tokenizer of the model.
      messages: the messages, each with a `role` and a `content`.
      tokens: the ids of all messages, without the token that ended the last answer; empty until
        the first answer.
    """

    tokenizer: Tokenizer
    messages: tuple[Message, ...] = ()
    tokens: tuple[int, ...] = ()

    def with_system(self, text: str | None) -> Self:
        """A new conversation that begins with a system message; None leaves it out."""
        return replace(self, messages=(_message("system", text),) if text else (), tokens=())

    @property
    def num_turns(self) -> int:
        """Answers so far."""
        return sum(message["role"] == "assistant" for message in self.messages)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end an answer, in addition to the stop ids of the tokenizer."""
        return ("\n",) if self.tokenizer.chat_template is None else ()

    def prompt(self, text: str) -> list[int]:
        """Token ids of the conversation with one more message of the user.

        They begin with `tokens`.

        Raises:
          ModelError: the text cannot be encoded, or the template does not suit conversations.
        """
        user = _message("user", text)
        if self.tokenizer.chat_template is None:
            return self._transcript(user)
        if not self.tokens:
            return self._encode(self._render([*self.messages, user]))
        mark = _absent_from([text, *(message["content"] for message in self.messages)])
        answer = _message("assistant", mark)
        parts = self._render([*self.messages[:-1], answer, user]).split(mark)
        if len(parts) != 2 or not parts[1]:
            raise ModelError(
                "the chat template leaves out the assistant's answers, so it does not suit "
                "conversations"
            )
        return [*self.tokens, *self._encode(parts[1])]

    def answered(
        self, text: str, prompt: Sequence[int], answer: Sequence[int], answer_text: str
    ) -> Self:
        """The conversation with one more turn.

        Args:
          text: what the user said.
          prompt: the ids that `prompt(text)` returned.
          answer: the generated ids, with or without the stop id that ended them.
          answer_text: the text of the answer.
        """
        stopped = bool(answer) and answer[-1] in self.tokenizer.stop_ids
        kept = answer[:-1] if stopped else answer  # the template writes the end of a turn itself
        turn = _message("user", text), _message("assistant", answer_text)
        return replace(self, messages=(*self.messages, *turn), tokens=(*prompt, *kept))

    def _transcript(self, user: Message) -> list[int]:
        """The prompt for a model that has no chat template."""
        turn = f"User: {user['content']}\nAssistant:"
        if self.tokens:
            ended = self.tokenizer.decode(self.tokens[-1:]).endswith("\n")
            return [*self.tokens, *self._encode(turn if ended else "\n" + turn)]
        forms = {"user": "User: {}\n", "assistant": "Assistant: {}\n"}
        said = [
            forms.get(message["role"], "{}\n\n").format(message["content"])
            for message in self.messages
        ]
        return self.tokenizer.encode("".join(said) + turn)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _render(self, messages: Sequence[Message]) -> str:
        return render_chat(
            self.tokenizer.chat_template,
            messages,
            add_generation_prompt=True,
            bos_token=self.tokenizer.bos_token,
            eos_token=self.tokenizer.eos_token,
        )


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _absent_from(texts: Sequence[str]) -> str:
    """A text that none of them contains."""
    marks = ("\ue000" * n for n in count(1))
    return next(mark for mark in marks if not any(mark in text for text in texts))

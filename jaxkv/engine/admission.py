"""Which requests an engine takes: what is refused at submission.

A `Request` has checked its own values already; here they are compared with what the engine has.
"""

from dataclasses import dataclass

from jaxkv.compress import Budget
from jaxkv.compress.kept import num_protected
from jaxkv.engine.request import Request, RequestError


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What an engine can serve.

    Attributes:
      vocab_size: V.
      max_positions: longest sequence that the model takes, in tokens.
      capacity: longest sequence that the cache holds; None if it sets no limit.
      max_length: longest sequence that the engine takes, prompt and answer.
      has_text: the engine has a detokenizer.
      budget: how many tokens of a context are kept; None if the engine drops none by a score.
    """

    vocab_size: int
    max_positions: int
    capacity: int | None
    max_length: int
    has_text: bool
    budget: Budget | None

    def check(self, request: Request, *, stepwise: bool = False) -> None:
        """Raises RequestError if the engine can never serve a request."""
        for token in (*request.prompt, *request.stop_ids):
            self.check_token(token)
        self._check_length(request)
        self._check_dropping(request)
        if request.stop_strings and (stepwise or not self.has_text):
            raise RequestError("stop strings need an engine with a detokenizer, and no stepwise")
        if request.n > 1 and stepwise:
            raise RequestError("a stepwise request has one answer: fork it for more")

    def check_token(self, token: int) -> None:
        """Raises RequestError if a token id is not in the vocabulary."""
        if not 0 <= token < self.vocab_size:
            raise RequestError(f"token id {token} is outside the vocabulary of {self.vocab_size}")

    def _check_length(self, request: Request) -> None:
        longest = self.max_length - min(1, request.max_new_tokens)  # room for one token of answer
        if len(request.prompt) > longest:
            cache = "" if self.capacity is None else f", the cache {self.capacity}"
            raise RequestError(
                f"the prompt has {len(request.prompt)} tokens; the longest that fits is {longest} "
                f"(the model takes {self.max_positions} with the answer{cache})"
            )

    def _check_dropping(self, request: Request) -> None:
        if self.budget is None:
            if request.context is not None or request.protect:
                raise RequestError(
                    "context and protect need an engine with a score method (windows are none)"
                )
            return
        context = request.context or len(request.prompt)
        protected, keep = num_protected(request.protect), self.budget.keep(context)
        if protected > keep:
            raise RequestError(
                f"protect has {protected} tokens; the budget {self.budget} keeps {keep} of "
                f"{context}"
            )

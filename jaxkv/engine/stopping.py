"""Text of a growing answer, cut before the first stop string.

Text that may be the beginning of a stop string is held back until it is known not to be one.
"""

from collections.abc import Callable, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Turns a growing sequence of token ids into text. Each request has its own object."""

    def push(self, ids: list[int]) -> str:
        """Returns the text that these further tokens complete."""
        ...

    def flush(self) -> str:
        """Returns the remaining text after the last token."""
        ...


DetokenizerFactory = Callable[[], Detokenizer]


class AnswerText:
    """Detokenised text of one answer.

    Attributes:
      stopped: a stop string was found; no text follows.
    """

    def __init__(self, detokenizer: Detokenizer, stop_strings: Sequence[str]):
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Returns the text that is certain after a further token."""
        return self._settle(self._detokenizer.push([token]), final=False)

    def finish(self) -> str:
        """Returns the remaining text after the last token."""
        return self._settle(self._detokenizer.flush(), final=True)

    def _settle(self, text: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = [at for stop in self._stop_strings if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            cut = min(found)
        else:
            cut = len(self._held) - (0 if final else self._possible_stop())
        settled, self._held = self._held[:cut], self._held[cut:]
        return settled

    def _possible_stop(self) -> int:
        """Length of the longest suffix of the held text that begins a stop string."""
        longest = 0
        for stop in self._stop_strings:
            for n in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:n]):
                    longest = n
                    break
        return longest

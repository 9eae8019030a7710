"""Text of a growing answer, cut before the first stop string.

Text that may be the beginning of a stop string is held back until it is known not to be.
"""

from jaxkv.engine.request import Detokenizer


class AnswerText:
    """Detokenised text of one answer.

    Attributes:
      stopped: a stop string was found; nothing follows.
    """

    def __init__(self, detokenizer: Detokenizer, stop_strings: tuple[str, ...]):
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Returns the text that a further token makes certain."""
        return self._settle(self._detokenizer.push([token]), final=False)

    def finish(self) -> str:
        """Returns the rest, when no token follows."""
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
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self._stop_strings:
            for n in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:n]):
                    longest = n
                    break
        return longest

"""How many tokens a method keeps."""

import re
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Budget:
    """A part of a sequence's tokens, or a number of them.

    Attributes:
      kept: a Fraction from above 0 to 1 is the part that is kept; an int the number.

    Raises:
      ValueError: it is neither, or nothing would be kept, or more than there is.
    """

    kept: Fraction | int

    def __post_init__(self) -> None:
        if not isinstance(self.kept, Fraction | int) or isinstance(self.kept, bool):
            raise ValueError(
                f"a budget must be Fraction or int, got {self.kept!r}; parse reads text"
            )
        _check(self.kept, self.kept)

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Reads `0.5` or `50%` as a part, `256` as a number.

        Raises:
          ValueError: it is neither, or nothing would be kept, or more than there is.
        """
        if not isinstance(text, str):
            raise ValueError(f"budget {text!r}: only text is parsed")
        match = re.fullmatch(r"([0-9]{1,9})(\.[0-9]{1,9})?(%?)", text.strip())
        if match is None:
            raise ValueError(
                f"budget {text!r}: must be a part, as 0.5 or 50%, or a number of tokens"
            )
        whole, decimals, percent = match.groups()
        kept = int(whole)
        if decimals or percent:
            kept = Fraction(whole + (decimals or "")) / (100 if percent else 1)
        _check(kept, text)
        return cls(kept)

    @property
    def is_part(self) -> bool:
        """It is a part of the tokens and no number."""
        return isinstance(self.kept, Fraction)

    def keep(self, num_tokens: int) -> int:
        """Tokens that are kept of so many, rounded down and one at least."""
        if isinstance(self.kept, Fraction):
            return max(1, int(self.kept * num_tokens))
        return min(self.kept, num_tokens)

    def __str__(self) -> str:
        return f"{float(self.kept):g}" if self.is_part else str(self.kept)


def _check(kept: Fraction | int, said: object) -> None:
    """Raises ValueError, with what was said, where it is no budget."""
    if kept <= 0 or (isinstance(kept, Fraction) and kept > 1):
        raise ValueError(f"budget {said!r}: a part is above 0 and at most 1, a number at least 1")

"""How many tokens a method keeps."""

import re
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True, init=False)
class Budget:
    """How many tokens are kept: a part of a sequence's tokens, or a number of them.

    `Budget("50%")`, `Budget("0.5")` and `Budget(0.5)` keep half of the tokens; `Budget("256")` and
    `Budget(256)` keep 256. So `1` keeps one token, `1.0` and `"100%"` keep all.

    Attributes:
      kept: the part, a Fraction above 0 and at most 1, or the number of tokens, an int.
      is_part: `kept` is a part.
    """

    kept: Fraction | int
    is_part: bool = field(repr=False)  # compared too: one token is not all tokens

    def __init__(self, kept: Fraction | int | float | str):
        """Reads a budget.

        Args:
          kept: a Fraction or float for a part, an int for a number of tokens, or text: `0.5` and
            `50%` are parts, `256` is a number.

        Raises:
          ValueError: it is none of these, or it keeps nothing, or more than all tokens.
        """
        value = _read(kept)
        if value <= 0 or (isinstance(value, Fraction) and value > 1):
            raise ValueError(
                f"budget {kept!r}: a part must be above 0 and at most 1, a number at least 1"
            )
        object.__setattr__(self, "kept", value)
        object.__setattr__(self, "is_part", isinstance(value, Fraction))

    def keep(self, num_tokens: int) -> int:
        """Returns how many of `num_tokens` tokens are kept: parts are rounded down, and at least
        one token is kept."""
        if isinstance(self.kept, Fraction):
            return max(1, int(self.kept * num_tokens))
        return min(self.kept, num_tokens)

    def __str__(self) -> str:
        return str(float(self.kept) if self.is_part else self.kept)


def _read(kept: object) -> Fraction | int:
    """The value that was given, as a Fraction or an int; its range is not checked."""
    if isinstance(kept, Fraction | int) and not isinstance(kept, bool):
        return kept
    if isinstance(kept, float) and 0 <= kept <= 1:
        return Fraction(str(kept))
    match = re.fullmatch(r"([0-9]{1,9})(\.[0-9]{1,9})?(%?)", str(kept).strip())
    if match is None or not isinstance(kept, str):
        raise ValueError(
            f"budget {kept!r}: must be a part, as 0.5 or 50%, or a number of tokens, as 256"
        )
    whole, decimals, percent = match.groups()
    if not decimals and not percent:
        return int(whole)
    return Fraction(whole + (decimals or "")) / (100 if percent else 1)

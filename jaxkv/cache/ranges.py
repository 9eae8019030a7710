"""The ranges of a model's K and V, measured on text, for formats with static scales.

`jaxkv.eval` measures them, and `choice` makes scales of them.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from pallas_kernels.codes import LIMIT

LEAST = 1e-12  # float32 cannot divide by the scale of a smaller range
_KIND = "jaxkv KV ranges"


@dataclass(frozen=True)
class KVRanges:
    """The largest magnitudes of K and V that were measured for a model.

    Example: `KVRanges.load(Path("ranges.json"))` reads what `jaxkv calibrate` wrote.

    Attributes:
      largest: for each layer `[2K]`, of K and V alternating.

    Raises:
      ValueError: one of them is not a number above LEAST, or is larger than codes can hold.
    """

    largest: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for layer, numbers in enumerate(self.largest):
            for x in numbers:
                is_number = isinstance(x, int | float) and not isinstance(x, bool)
                if not is_number or not LEAST < x <= LIMIT:
                    raise ValueError(
                        f"layer {layer}: a range of K or V must be above {LEAST} and at most "
                        f"{LIMIT:.0f}, got {x!r}"
                    )

    @property
    def id(self) -> str:
        """Eight hexadecimal digits that identify these ranges."""
        return hashlib.sha256(json.dumps(self.largest).encode()).hexdigest()[:8]

    def save(self, path: Path) -> None:
        """Writes a JSON file that `load` reads."""
        path.write_text(json.dumps({"kind": _KIND, "largest": self.largest}) + "\n", "utf-8")

    @classmethod
    def load(cls, path: Path) -> "KVRanges":
        """Reads a file that `save` wrote.

        Raises:
          ValueError: the file is of another kind.
          OSError: the file cannot be read.
        """
        try:
            record = json.loads(path.read_text("utf-8"))
            if record["kind"] != _KIND:
                raise ValueError("another kind")
            return cls(tuple(map(tuple, record["largest"])))
        except (KeyError, TypeError, ValueError, RecursionError):
            raise ValueError(f"{path}: not a file of KV ranges as `calibrate` writes it") from None

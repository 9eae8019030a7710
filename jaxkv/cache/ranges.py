"""The ranges of a model's K and V, measured on text, for formats with static scales.

Not here: the measuring (`jaxkv.eval`), nor how a range becomes a scale (`choice`).
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from pallas_kernels.codes import LIMIT

LEAST = 1e-12  # a smaller range would make a scale that float32 cannot divide by
_KIND = "jaxkv KV ranges"


@dataclass(frozen=True)
class KVRanges:
    """The largest magnitudes of K and V that a model was seen to make.

    Attributes:
      largest: of each layer `[2K]`, of K and V by turns.

    Raises:
      ValueError: one of them is no number above LEAST and at most what codes can hold.
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
        """Eight digits that tell these ranges from others."""
        return hashlib.sha256(json.dumps(self.largest).encode()).hexdigest()[:8]

    def save(self, path: Path) -> None:
        """Writes a file that `load` reads: JSON."""
        path.write_text(json.dumps({"kind": _KIND, "largest": self.largest}) + "\n", "utf-8")

    @classmethod
    def load(cls, path: Path) -> "KVRanges":
        """Reads a file.

        Raises:
          ValueError: it is none that `save` wrote.
          OSError: it cannot be read.
        """
        try:
            record = json.loads(path.read_text("utf-8"))
            if record["kind"] != _KIND:
                raise ValueError("of another kind")
            return cls(tuple(map(tuple, record["largest"])))
        except (KeyError, TypeError, ValueError, RecursionError):
            raise ValueError(f"{path}: no file of KV ranges as `calibrate` writes them") from None

"""What every checkpoint form offers the loader: a config, and tensors read one at a time.

Names are those of Hugging Face checkpoints, Gemma's own where it has more norms than Llama
(`names.tensor_shapes`). Values mean what they mean in Llama's: `[out, in]` matrices, half-split
RoPE, norm weights that are the whole factor (a form that stores `w - 1` adds one while reading).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxkv.models.config import ModelConfig


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor that is still on disk.

    Attributes:
      name: Hugging Face name.
      shape: `[out, in]` for a matrix.
      read_into: writes the values, cast to the array's dtype, into an array of `shape` (any
        strides), without ever holding a second whole copy in memory.
    """

    name: str
    shape: tuple[int, ...]
    read_into: Callable[[np.ndarray], None]


class Checkpoint(Protocol):
    """An opened checkpoint; opening reads the config and the tensors' directory, not the values."""

    @property
    def config(self) -> ModelConfig: ...

    def tensors(self) -> Iterator[CheckpointTensor]:
        """Yields every tensor once, in file order; raises ModelError for one it cannot read."""
        ...

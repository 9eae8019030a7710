"""What every kind of checkpoint offers the loader: a config, and tensors that are read one by one.

Tensors have the names of Hugging Face checkpoints (`names.tensor_shapes`). Values are as in
Llama's: `[out, in]` matrices, half-split RoPE, and norm weights that are the whole factor (a
checkpoint that stores `w - 1` adds one while reading).
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
      read_into: writes the values into an array of `shape` with any strides, cast to its dtype. It
        never holds a second whole copy in memory.
    """

    name: str
    shape: tuple[int, ...]
    read_into: Callable[[np.ndarray], None]


class Checkpoint(Protocol):
    """An opened checkpoint: its config and list of tensors were read, but no values yet."""

    @property
    def config(self) -> ModelConfig: ...

    def tensors(self) -> Iterator[CheckpointTensor]:
        """Yields every tensor once, in file order.

        Raises:
          ModelError: a tensor cannot be read.
        """
        ...

"""Checkpoints on disk, with one interface: Hugging Face directories and GGUF files.

`open_checkpoint(path)` finds out which one a path is. Tensors are read one at a time
(`base.Checkpoint`). Checkpoints that `jaxkv convert` wrote are read in
`jaxkv.models.orbax_checkpoint`, and models are fetched by name in `jaxkv.models.pretrained`.
"""

from pathlib import Path

from jaxkv.models.checkpoints.base import Checkpoint, CheckpointTensor
from jaxkv.models.checkpoints.gguf_reader import open_gguf_checkpoint
from jaxkv.models.checkpoints.safetensors_dir import open_safetensors
from jaxkv.models.errors import ModelError

__all__ = ["Checkpoint", "CheckpointTensor", "open_checkpoint"]


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a directory of `config.json` and `.safetensors` files, or a `.gguf` file.

    Raises:
      ModelError: the path is neither of them, or it cannot be used.
    """
    path = Path(path)
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ModelError(f"{path}: has no config.json, so it is not a Hugging Face model")
        return open_safetensors(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory")
    if path.suffix != ".gguf":
        raise ModelError(
            f"{path}: not a model; a model is a directory with config.json and .safetensors "
            "files, or a file that ends in .gguf"
        )
    return open_gguf_checkpoint(path)

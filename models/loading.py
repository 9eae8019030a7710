"""Loads a model and its tokenizer from anything that `--model` accepts.

This is a name of `jaxkv.models.pretrained.RELEASES`, a Hugging Face directory, a GGUF file, or a
checkpoint that `jaxkv convert` wrote. `jaxkv.models.checkpoints` and
`jaxkv.models.orbax_checkpoint` read them, and `jaxkv.models.weights` makes tensors into parameters.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp
from jax.typing import DTypeLike
from tqdm import tqdm

from jaxkv.models.checkpoints import open_checkpoint
from jaxkv.models.checkpoints.gguf_reader import GgufCheckpoint
from jaxkv.models.decode_model import FlaxDecodeModel
from jaxkv.models.errors import ModelError
from jaxkv.models.pretrained import RELEASES, model_path
from jaxkv.models.tokenizer import Tokenizer, tokenizer_from_dir, tokenizer_from_gguf
from jaxkv.models.weights import DTYPES, Progress, load_weights


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that is ready to decode.

    Attributes:
      name: the name or path that the user gave.
      model: the decoder with its parameters.
      tokenizer: None if the checkpoint has no tokenizer.
      source: the file or directory that it was read from.
    """

    name: str
    model: FlaxDecodeModel
    tokenizer: Tokenizer | None
    source: Path

    def require_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer; raises ModelError if there is none."""
        if self.tokenizer is None:
            raise ModelError(
                f"{self.source}: has no tokenizer, so it takes token ids and no text; put the "
                "model's tokenizer.json next to its config.json"
            )
        return self.tokenizer


def load_model(
    name_or_path: str, dtype: DTypeLike = jnp.float32, *, progress: Progress | None = None
) -> LoadedModel:
    """Loads a model, tensor by tensor; a named one is downloaded the first time.

    Args:
      name_or_path: a key of `jaxkv.models.pretrained.RELEASES`, which precedes a path;
        a directory of `config.json` and `.safetensors` files; a `.gguf` file; or a directory that
        `jaxkv.models.orbax_checkpoint.save_checkpoint` wrote.
      dtype: type of the matrices: float32, bfloat16 or float16. Norm weights are always float32.
      progress: called with the bytes of parameters loaded so far, and their total.

    Raises:
      ModelError: `name_or_path` is none of these, or the files there cannot be used.
    """
    if jnp.dtype(dtype).name not in DTYPES:
        raise ModelError(f"weights of {jnp.dtype(dtype).name}: {', '.join(DTYPES)} will do")
    path = model_path(name_or_path) if name_or_path in RELEASES else Path(name_or_path)
    if (path / "jaxkv.json").is_file():
        # Imported late: Orbax takes a second to import, and few runs need it.
        from jaxkv.models.orbax_checkpoint import open_orbax

        return _named(open_orbax(path, dtype, progress=progress), name_or_path)
    is_gguf = path.is_file() and path.suffix == ".gguf"
    if not is_gguf and not (path / "config.json").is_file():
        raise ModelError(
            f"{name_or_path!r} is no model; what may be given: {', '.join(RELEASES)}, a Hugging "
            "Face directory (config.json and .safetensors files), a .gguf file, or a directory "
            "that `jaxkv convert` wrote"
        )
    checkpoint = open_checkpoint(path)
    if isinstance(checkpoint, GgufCheckpoint):
        tokenizer = _gguf_tokenizer(checkpoint)
    else:
        tokenizer = tokenizer_from_dir(path) if (path / "tokenizer.json").exists() else None
    model = load_weights(checkpoint, dtype, progress)
    return _named(LoadedModel("", model, tokenizer, path), name_or_path)


@contextmanager
def loading_bar() -> Iterator[Progress]:
    """Shows a progress bar on stderr, if that is a terminal; pass it to `load_model`."""
    bars: list[tqdm] = []

    def show(done: int, total: int) -> None:
        if not bars:  # a download comes first and has its own bar
            bars.append(tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=None))
        bars[0].update(done - bars[0].n)

    try:
        yield show
    finally:
        for bar in bars:
            bar.close()


def _named(loaded: LoadedModel, name: str) -> LoadedModel:
    """Gives a model its name, and removes stop ids that it can never draw."""
    tokenizer, V = loaded.tokenizer, loaded.model.vocab_size
    if tokenizer is not None:
        stop_ids = frozenset(token for token in tokenizer.stop_ids if 0 <= token < V)
        tokenizer = replace(tokenizer, stop_ids=stop_ids)
    return replace(loaded, name=name, tokenizer=tokenizer)


def _gguf_tokenizer(checkpoint: GgufCheckpoint) -> Tokenizer | None:
    metadata = checkpoint.file.metadata
    if "tokenizer.ggml.model" not in metadata:
        return None
    try:
        return tokenizer_from_gguf(metadata)
    except ModelError as error:
        raise ModelError(f"{checkpoint.file.path}: {error}") from None

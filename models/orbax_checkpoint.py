"""The checkpoints that `jaxkv convert` writes: parameters through Orbax, config and tokenizer.

    jaxkv.json    version, config, dtype, and size and CRC-32 of every file below
    params/       Orbax; one entry per parameter, named by its path: `layers.0.mlp.down.weight`
    tokenizer/    the tokenizer files of a Hugging Face directory, or a GGUF file's metadata as
                  JSON; absent if the model has no tokenizer

Parameters are stored as the decoder holds them (q, k and v in one matrix), so that reading converts
nothing.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.typing import DTypeLike

from jaxkv.models.checkpoints.config_json import config_from_json, config_to_json
from jaxkv.models.checkpoints.gguf_file import open_gguf
from jaxkv.models.config import ModelConfig
from jaxkv.models.decode_model import FlaxDecodeModel, ParamPath
from jaxkv.models.errors import ModelError
from jaxkv.models.loading import LoadedModel
from jaxkv.models.tokenizer import Tokenizer, tokenizer_from_dir, tokenizer_from_gguf
from jaxkv.models.weights import DTYPES, Progress, abstract_model
from jaxkv.models.whole_files import are_sums, check_sums, sums_of

HEADER, PARAMS, TOKENIZER = "jaxkv.json", "params", "tokenizer"
VERSION = 1
_GGUF_METADATA = "gguf.json"
_TOKENIZER_FILES = (  # what `tokenizer_from_dir` reads
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
)
_GROUP_BYTES = 16 << 20  # read at once: few calls, and little memory compared with the parameters


def check_target(path: Path) -> None:
    """Raises ModelError unless `path` is absent or an empty directory."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ModelError(f"{path}: exists already; name a new or empty directory")


def save_checkpoint(path: Path, loaded: LoadedModel) -> None:
    """Writes a model to a directory, which appears only when it is complete.

    Args:
      path: absent, or an empty directory.
      loaded: the model. Tokenizer files are copied from the source it was read from.

    Raises:
      ModelError: `path` is not empty, or cannot be written.
    """
    path = Path(path)
    check_target(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{path.name}-", dir=path.parent) as temporary:
            folder = Path(temporary) / path.name
            folder.mkdir()
            _save_tokenizer(loaded, folder / TOKENIZER)
            _save_params(loaded.model, folder / PARAMS)
            (folder / HEADER).write_text(json.dumps(_header(loaded.model, folder), indent=1))
            folder.rename(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be written: {error.strerror or error}") from error


def open_orbax(
    path: Path, dtype: DTypeLike | None = None, *, progress: Progress | None = None
) -> LoadedModel:
    """Reads what `save_checkpoint` wrote.

    Args:
      path: the directory.
      dtype: dtype of the matrices; None keeps the saved one, and then every bit is the same.
      progress: called with the bytes of parameters that are in place, and their total.

    Raises:
      ModelError: the directory is missing, was not written by `save_checkpoint`, has another
        version, or is damaged.
    """
    path = Path(path)
    header = _read_header(path)
    config = config_from_json(header["config"], f"{path / HEADER}: config")
    model = _read_params(
        path / PARAMS, config, header["dtype"] if dtype is None else dtype, progress
    )
    return LoadedModel(str(path), model, _read_tokenizer(path / TOKENIZER), path)


def _header(model: FlaxDecodeModel, folder: Path) -> dict[str, Any]:
    return {
        "version": VERSION,
        "dtype": model.named_params[("embedding",)].dtype.name,
        "config": config_to_json(model.config),
        "files": sums_of(folder),
    }


def _read_header(path: Path) -> dict[str, Any]:
    """Reads and checks the header, and checks that every file is as it was written.

    This happens before Orbax reads any file, since a failed read leaves other reads unfinished.
    """
    file = path / HEADER
    try:
        header = json.loads(file.read_bytes())
    except OSError:
        raise ModelError(
            f"{path}: has no {HEADER}, so it is no checkpoint that `jaxkv convert` wrote"
        ) from None
    except ValueError:
        header = None
    if not isinstance(header, dict) or "version" not in header:
        raise ModelError(f"{file}: is damaged; write the checkpoint again")
    if header["version"] != VERSION:
        raise ModelError(
            f"{file}: is of version {header['version']!r}, and only {VERSION} is read; write the "
            "checkpoint again"
        )
    sound = isinstance(header.get("config"), dict) and are_sums(header.get("files"))
    if not sound or header.get("dtype") not in DTYPES:
        raise ModelError(f"{file}: is damaged; write the checkpoint again")
    check_sums(path, header["files"], "copy or write the checkpoint again")
    return header


def _save_params(model: FlaxDecodeModel, folder: Path) -> None:
    tree = {_entry(path): value for path, value in model.named_params.items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(tree))


def _read_params(
    folder: Path, config: ModelConfig, dtype: DTypeLike, progress: Progress | None
) -> FlaxDecodeModel:
    graphdef, shapes = abstract_model(config, dtype)
    entries = {_entry(path): shape for path, shape in shapes.items()}
    done, total = 0, sum(_num_bytes(shape) for shape in shapes.values())
    read: dict[str, jax.Array] = {}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        try:
            _check_stored(checkpointer.metadata(folder.absolute()), folder, entries)
            for group in _groups(entries):
                read |= checkpointer.restore(folder.absolute(), args=_restore_args(group))
                done += sum(_num_bytes(shape) for shape in group.values())
                if progress is not None:
                    progress(done, total)
        except ModelError:
            raise
        except Exception as error:  # Orbax passes on any exception of the storage layer
            reason = (str(error) or type(error).__name__).partition("\n")[0]
            raise ModelError(
                f"{folder}: cannot be read ({reason:.200}); copy or write the checkpoint again"
            ) from error
    named = {path: read[_entry(path)] for path in shapes}
    return FlaxDecodeModel.from_named(config, graphdef, named)


def _check_stored(metadata: Any, folder: Path, entries: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raises ModelError where the stored parameters are not those that the config describes."""
    stored = metadata.item_metadata.tree
    for name, shape in entries.items():
        found = stored[name].shape if name in stored else None
        if found != shape.shape:
            state = "is missing" if found is None else f"has shape {found}"
            raise ModelError(
                f"{folder}: {name} {state}, and {HEADER} says {shape.shape}; copy or write the "
                "checkpoint again"
            )


def _restore_args(group: Mapping[str, jax.ShapeDtypeStruct]) -> ocp.args.PyTreeRestore:
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    target = {
        name: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
        for name, shape in group.items()
    }
    return ocp.args.PyTreeRestore(
        item=target,
        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        partial_restore=True,
    )


def _groups(
    entries: Mapping[str, jax.ShapeDtypeStruct],
) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    """Cuts `entries` into runs of about _GROUP_BYTES; a larger parameter is a run by itself."""
    group: dict[str, jax.ShapeDtypeStruct] = {}
    for name, shape in entries.items():
        if group and sum(map(_num_bytes, group.values())) + _num_bytes(shape) > _GROUP_BYTES:
            yield group
            group = {}
        group[name] = shape
    yield group


def _entry(path: ParamPath) -> str:
    return ".".join(map(str, path))


def _num_bytes(shape: jax.ShapeDtypeStruct) -> int:
    return shape.size * shape.dtype.itemsize


def _save_tokenizer(loaded: LoadedModel, folder: Path) -> None:
    if loaded.tokenizer is None:
        return
    source = loaded.source
    if (source / HEADER).is_file():
        shutil.copytree(source / TOKENIZER, folder)
        return
    folder.mkdir()
    if source.is_dir():
        for name in _TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        return
    metadata = open_gguf(source).metadata
    kept = {key: metadata[key] for key in metadata if key.startswith("tokenizer.")}
    (folder / _GGUF_METADATA).write_text(json.dumps(kept))


def _read_tokenizer(folder: Path) -> Tokenizer | None:
    if not folder.is_dir():
        return None
    metadata = folder / _GGUF_METADATA
    if not metadata.is_file():
        return tokenizer_from_dir(folder)
    try:
        return tokenizer_from_gguf(json.loads(metadata.read_bytes()))
    except ValueError as error:  # includes ModelError, which does not name the file
        raise ModelError(f"{metadata}: {error}") from None

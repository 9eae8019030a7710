"""The folder of a study: it belongs to one run, and its files are complete.

The results of a run are a function of its model, text and options. These are in run.json, contents
as checksums. A later command continues in the folder if they are the same, and is refused
otherwise. This module is not a command.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxkv.models.checkpoints.config_json import config_to_json
from jaxkv.models.decode_model import FlaxDecodeModel
from jaxkv.models.errors import ModelError
from jaxkv.models.whole_files import write_whole

RUN = "run.json"


def claim(folder: Path, run: Mapping[str, Any], *results: str) -> None:
    """Claims a folder for a run, or checks that it belongs to it.

    Args:
      folder: the folder; it is created if it does not exist.
      run: everything that determines the results, in JSON's types.
      results: patterns of the files from which the run continues.

    Raises:
      ModelError: the folder belongs to another run, or has results of an unknown run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / RUN
    elsewhere = "remove the folder, or choose another"
    if not file.exists():
        if any(path for pattern in results for path in folder.glob(pattern)):
            raise ModelError(f"{file}: is missing although there are results; {elsewhere}")
        write_whole(file, json.dumps(run, indent=1) + "\n")
        return
    try:
        found = json.loads(file.read_text("utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ModelError(f"{file}: is damaged; {elsewhere}")
    names = dict.fromkeys([*run, *found])
    other = [name for name in names if found.get(name) != run.get(name)]
    if other:
        were = ", ".join(f"{name} was {found.get(name)}, is {run.get(name)}" for name in other)
        raise ModelError(f"{folder}: belongs to another run ({were}); {elsewhere}")


def text_sum(tokens: Iterable[int]) -> str:
    """Returns a checksum of a text as a model sees it."""
    return sum_of([np.fromiter(tokens, np.int32).tobytes()])


def model_sum(model: FlaxDecodeModel) -> str:
    """Returns a checksum of a model: of its config and its parameters."""
    config = json.dumps(config_to_json(model.config), sort_keys=True)
    return sum_of(chain([config.encode()], map(_bytes, model.params)))


def sum_of(parts: Iterable[bytes]) -> str:
    """Returns the first digits of the SHA-256 of some bytes."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:16]


def _bytes(x: jax.Array) -> bytes:
    return f"{x.dtype}{x.shape}".encode() + np.asarray(x).tobytes()

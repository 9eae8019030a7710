"""Public models by name, as on the hub in lower case.

`presets.json` has of each the repository on the Hugging Face hub whose `config.json` its keys are
from, and the number of parameters that the repository states, which the keys must add up to. Keys
that do not change bytes or multiply-adds are left out. Not here: how keys are read (`config_json`).
"""

import difflib
import json
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from jaxkv.ledger.config_json import model_from_config
from jaxkv.ledger.errors import LedgerError
from jaxkv.ledger.shapes import Model

ALIASES = {"gemma3-270m": "gemma-3-270m"}  # as the model is named elsewhere in this library


def preset_names() -> list[str]:
    """The names of all presets, in the order of the file: families together."""
    return list(_presets())


def preset(name: str) -> Model:
    """The model of that name; case does not matter.

    Raises:
      LedgerError: there is none.
    """
    known = _presets()
    found = ALIASES.get(name.lower(), name.lower())
    if found not in known:
        close = difflib.get_close_matches(found, known, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise LedgerError(f"no preset {name!r}{hint} (--models lists them, --config takes a file)")
    entry = known[found]
    model = model_from_config(
        entry["config"], name=found, where=found, source=f"{entry['hub']} config.json"
    )
    if "note" in entry:
        model = replace(model, notes=(*model.notes, entry["note"]))
    return model


def stated_parameters(name: str) -> int | None:
    """Parameters that a preset's repository states; None where it counts more than the preset."""
    return _presets()[name].get("parameters")


@cache
def _presets() -> dict[str, dict[str, Any]]:
    return json.loads((files("jaxkv.ledger") / "presets.json").read_text("utf-8"))

"""Public models by name, in lower case as on the Hugging Face hub.

For each model, `presets.json` names the repository on the hub whose `config.json` its keys are
from, and the number of parameters that the repository states; the keys must add up to it. Keys that
do not change bytes or multiply-adds are left out.
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

ALIASES = {"gemma3-270m": "gemma-3-270m"}  # its name elsewhere in this library


def preset_names() -> list[str]:
    """Returns the names of all presets, ordered by family."""
    return list(_presets())


def preset(name: str) -> Model:
    """Returns the model of a name; case does not matter.

    Raises:
      LedgerError: there is no such preset.
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
    """Returns the number of parameters that the repository of a preset states; None if it counts
    more than the preset."""
    return _presets()[name].get("parameters")


@cache
def _presets() -> dict[str, dict[str, Any]]:
    return json.loads((files("jaxkv.ledger") / "presets.json").read_text("utf-8"))

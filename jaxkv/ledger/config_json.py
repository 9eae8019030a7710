"""A Hugging Face `config.json` as a `Model`: its layers, what each keeps, and its parameters.

A `model_type` that `families` does not know is read by its keys, with a note that says so. Only the
text model counts: a vision or audio tower is left out, with a note.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxkv.ledger.errors import LedgerError
from jaxkv.ledger.families import FAMILIES, Family, guess
from jaxkv.ledger.keys import HARMLESS, OUTER, Keys
from jaxkv.ledger.mixers import read_layers
from jaxkv.ledger.shapes import Model
from jaxkv.printable import printable, shortened


def load_config(path: Path) -> Model:
    """Reads a `config.json`, or the one in a folder. The model is named after its folder.

    Raises:
      LedgerError: the file is not a JSON object, or `model_from_config` refuses it.
      OSError: the file cannot be read.
    """
    path = path / "config.json" if path.is_dir() else path
    where = printable(str(path))
    try:
        raw = json.loads(path.read_bytes(), object_pairs_hook=_once)
    except LedgerError as error:
        raise LedgerError(f"{where}: {error}") from None
    except (ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise LedgerError(f"{where}: is not JSON: {reason}") from None
    if not isinstance(raw, dict):
        raise LedgerError(f"{where}: is not a JSON object")
    parent = path.resolve().parent.name
    return model_from_config(raw, name=parent or where, where=where)


def model_from_config(
    raw: Mapping[str, Any], *, name: str, where: str = "config.json", source: str = ""
) -> Model:
    """Makes a model from a parsed `config.json`.

    Args:
      raw: the JSON object.
      name: name of the model.
      where: text that error messages start with.
      source: where the numbers are from.

    Raises:
      LedgerError: a key is missing, contradicts another key, or is unknown and may change the
        memory.
    """
    name, where = printable(name), printable(where)
    text = raw.get("text_config")
    notes: list[str] = []
    if isinstance(text, Mapping):
        outer = Keys({k: v for k, v in raw.items() if k != "text_config"}, where)
        if raw.get("tie_word_embeddings") is not None:
            text = {"tie_word_embeddings": raw["tie_word_embeddings"], **text}
        notes += outer.finish(OUTER)
        if set(raw) & {"vision_config", "audio_config"}:
            notes.append("only the text model; its vision and audio towers are not counted")
        raw = text
    keys = Keys(raw, where)
    model_type = keys.text("model_type")
    family = FAMILIES.get(model_type or "")
    if family is None:
        family = guess(keys)
        what = "is missing" if model_type is None else f"{shortened(model_type)!r} is not known"
        keys.note(f"model_type {what}: read by its keys, otherwise as a Llama")
    keys.expect(family.defaults)
    model = _model(keys, family, name, source)
    quantised = raw.get("quantization_config")
    if isinstance(quantised, Mapping):
        method = shortened(str(quantised.get("quant_method", "a method of its own")))
        keys.note(f"its weights are published quantised ({method}); counted as asked for")
    notes += keys.finish(HARMLESS)
    return replace(model, notes=tuple(notes))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of the file.

    Raises:
      LedgerError: a key is there twice, with different values.
    """
    found = dict(pairs)
    for key, value in pairs:
        if value != found[key] and value == value:  # NaN differs from itself
            raise LedgerError(f"{shortened(key)} is there twice, with different values")
    return found


def _model(keys: Keys, family: Family, name: str, source: str) -> Model:
    width = keys.integer("hidden_size", "n_embd")
    vocab = keys.integer("vocab_size")
    count = keys.integer("num_hidden_layers", "n_layer")
    if count > 10_000:
        raise keys.error("num_hidden_layers", "is more layers than any model has")
    positions = keys.integer_or_none(
        "max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length"
    )
    layers = read_layers(keys, family, width, count)
    embedding, vectors = vocab * width, width * (2 if family.norm_bias else 1)
    if family.learned_positions:
        if positions is None:
            raise LedgerError(f"{keys.where}: has no n_positions")
        embedding += positions * width
    if family.head_bias:
        vectors += vocab
    if family.per_layer_inputs:
        more, vectors_more = _per_layer_inputs(keys, width, count)
        embedding, vectors = embedding + more, vectors + vectors_more
    if not keys.given("tie_word_embeddings"):
        own = "true" if family.tied else "false"
        keys.note(f"tie_word_embeddings is missing: taken as {own}, the family's own")
    return Model(
        name=name,
        width=width,
        layers=layers,
        embedding=embedding,
        head_weights=vocab * width,
        tied=keys.flag("tie_word_embeddings", default=family.tied),
        vectors=vectors,
        max_context=positions,
        source=source,
    )


def _per_layer_inputs(keys: Keys, width: int, count: int) -> tuple[int, int]:
    """Returns the entries of Gemma 3n's tables outside of the layers, an embedding for each layer
    and AltUp's projections, and the size of a norm."""
    dim = keys.integer("hidden_size_per_layer_input")
    vocab = keys.integer("vocab_size_per_layer_input")
    copies = keys.integer("altup_num_inputs")
    tables = vocab * dim * count + width * dim * count
    return tables + 2 * (copies - 1) * width * width, dim

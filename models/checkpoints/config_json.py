"""A ModelConfig as JSON and back, exactly, for the checkpoints that `jaxkv convert` writes.

The `config.json` of a Hugging Face directory is read in `hf_config`.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jaxkv.models.config import LinearScaling, Llama3Scaling, ModelConfig, RopeScaling, YarnScaling
from jaxkv.models.errors import ModelError

_SCALING_NAMES: dict[type, str] = {
    LinearScaling: "linear",
    Llama3Scaling: "llama3",
    YarnScaling: "yarn",
}


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Returns a config in JSON's types; a RoPE scaling gets a `type`: linear, llama3 or yarn."""
    raw = asdict(config)
    raw["layers"] = list(raw["layers"])
    for layer, source in zip(raw["layers"], config.layers, strict=True):
        scaling = source.rope.scaling
        if scaling is not None:
            layer["rope"]["scaling"]["type"] = _SCALING_NAMES[type(scaling)]
    return raw


def config_from_json(raw: Mapping[str, Any], where: str = "config") -> ModelConfig:
    """Returns the config of which `config_to_json` made `raw`.

    Raises:
      ModelError: a key is missing, unknown, or has a value of the wrong type; the message starts
        with `where`.
    """
    return _decode(ModelConfig, raw, where)


def _decode(hint: Any, value: Any, where: str) -> Any:
    """Returns a value as the type `hint`, which must be a type that occurs in a ModelConfig."""
    origin = get_origin(hint)
    if hint == RopeScaling | None:
        return None if value is None else _scaling(value, where)
    if origin in (Union, UnionType):
        options = [option for option in get_args(hint) if option is not type(None)]
        return None if value is None else _decode(options[0], value, where)
    if origin is tuple and isinstance(value, list):
        item = get_args(hint)[0]
        return tuple(_decode(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is Literal and value in get_args(hint):
        return value
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint in (int, bool, str) and type(value) is hint:
        return value
    if hasattr(hint, "__dataclass_fields__") and isinstance(value, Mapping):
        return _decode_fields(hint, value, where)
    raise ModelError(f"{where}: {value!r} is not what this key holds; the file is damaged")


def _decode_fields(cls: type, raw: Mapping[str, Any], where: str) -> Any:
    names = [field.name for field in fields(cls)]
    for name in names:
        if name not in raw:
            raise ModelError(f"{where}: has no {name}")
    for name in raw:
        if name not in names:
            raise ModelError(f"{where}: {name} is unknown; was it written by a later version?")
    hints = get_type_hints(cls)
    return cls(**{name: _decode(hints[name], raw[name], f"{where}.{name}") for name in names})


def _scaling(raw: Any, where: str) -> RopeScaling:
    rest = dict(raw) if isinstance(raw, Mapping) else {}
    name = rest.pop("type", None)
    for cls, known in _SCALING_NAMES.items():
        if name == known:
            return _decode_fields(cls, rest, where)
    raise ModelError(f"{where}: type {name!r} is unknown; was it written by a later version?")

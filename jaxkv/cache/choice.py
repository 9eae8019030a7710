"""The KV format of each layer, with measured scales where the format needs them."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp

from jaxkv.cache.formats import KVFormat, PackageFormat, StaticFormat, get_format
from jaxkv.cache.ranges import KVRanges
from jaxkv.cache.spec import LayerSpec
from jaxkv.errors import UsageError
from jaxkv.kv_format import FormatSpec, formats_by_layer, is_format, parse_choice
from pallas_kernels.codes import largest_code


def choose_formats(
    choice: str | KVFormat, layers: Sequence[LayerSpec], ranges: KVRanges | None = None
) -> tuple[KVFormat, ...]:
    """Returns the format of each layer.

    Example:

        choose_formats("kivi4,window=bf16,0=int8", layers)
        choose_formats(Int2(), layers)  # a format of your own, for all layers

    Args:
      choice: a format of your own for all layers (`KVFormat`), or the name of a format of this
        package, optionally with others for some layers (`jaxkv.kv_format`).
      layers: the layers of the model.
      ranges: measured ranges of K and V, for static formats.

    Raises:
      ValueError: there is no such format or layer; a static format has no ranges of this model; a
        format of your own has a name that is not allowed or taken.
    """
    if ranges is not None and len(ranges.largest) != len(layers):
        raise ValueError(
            f"the KV ranges are of {len(ranges.largest)} layers, the model has {len(layers)}"
        )
    if not isinstance(choice, str):
        check_choice(choice)
        return (choice,) * len(layers)
    specs = formats_by_layer(choice, [layer.window is not None for layer in layers])
    return tuple(
        _static_format(spec, index, layer, ranges)
        if spec.kind == "static"
        else get_format(spec.name)
        for index, (spec, layer) in enumerate(zip(specs, layers, strict=True))
    )


def check_choice(choice: str | KVFormat) -> None:
    """Checks what can be checked of a choice while the layers are not known.

    Raises:
      UsageError: a part of a text names no format or no layers; the name of a format of your own is
        not allowed, or is the name of a format of this package.
    """
    if isinstance(choice, str):
        parse_choice(choice)
        return
    if isinstance(choice, type):
        raise UsageError(f"a KV format must be an object, got the class {choice.__name__}")
    name = choice.name  # pages are shared, exported and imported by it
    if not isinstance(name, str) or re.fullmatch(r"[\w.@-]+", name) is None:
        raise UsageError(f"the name of a KV format must be letters, digits and _.@-, got {name!r}")
    if is_format(name) and not isinstance(choice, PackageFormat):
        raise UsageError(f"{choice!r} has the name of a format of jaxkv, {name}")


def format_id(formats: Sequence[KVFormat]) -> str:
    """Returns one text for the formats of all layers, equal if and only if they are equal: `f32`,
    `int8*2+bf16*3`."""
    runs = [(name, len(list(run))) for name, run in itertools.groupby(f.name for f in formats)]
    return runs[0][0] if len(runs) == 1 else "+".join(f"{name}*{count}" for name, count in runs)


def _static_format(
    spec: FormatSpec, index: int, layer: LayerSpec, ranges: KVRanges | None
) -> StaticFormat:
    if ranges is None:
        raise ValueError(f"format {spec.name} needs scales that `calibrate` measured")
    largest = ranges.largest[index]
    if len(largest) != 2 * layer.kv_heads:
        raise ValueError(
            f"the KV ranges have {len(largest) // 2} KV heads in layer {index}, the model has "
            f"{layer.kv_heads}"
        )
    scales = tuple(x / largest_code(jnp.dtype(spec.dtype)) for x in largest)
    return StaticFormat(replace(spec, name=f"{spec.name}@{ranges.id}"), scales)

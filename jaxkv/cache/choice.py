"""Which layer has which format, as a text: `kivi4,window=bf16,0=int8,-1=int8`.

The first name holds for all layers; what follows is for some of them, and a later one counts more:
`window` and `full` are the layers with and without a window, a number is one layer, counted from
the end where it is negative. Not here: what a format is (`formats`).
"""

import itertools
import re
from collections.abc import Sequence

from jaxkv.cache.formats import STATIC, KVFormat, StaticFormat, get_format
from jaxkv.cache.ranges import KVRanges
from jaxkv.cache.spec import LayerSpec
from pallas_kernels.codes import largest_code


def preferred_page_size(text: str) -> int:
    """Tokens a page that suit a choice of formats: 32 where K's parameters are a page's."""
    names = [name for name, _ in _parts(text)]
    return 32 if any(name.startswith("kivi") for name in names) else 16


def check_choice(text: str) -> None:
    """Raises ValueError where a text names no format, or no way of choosing layers."""
    for name, where in _parts(text):
        if name not in STATIC:
            get_format(name)
        if where not in ("", "window", "full"):
            _layer_number(where)


def choose_formats(
    text: str, layers: Sequence[LayerSpec], ranges: KVRanges | None = None
) -> tuple[KVFormat, ...]:
    """The format of each layer.

    Args:
      text: see the module's docstring.
      layers: of the model.
      ranges: measured, for static formats.

    Raises:
      ValueError: no such format or layer, or a static format without ranges of this model.
    """
    if ranges is not None and len(ranges.largest) != len(layers):
        raise ValueError(
            f"the KV ranges are of {len(ranges.largest)} layers, the model has {len(layers)}"
        )
    chosen = [""] * len(layers)
    for name, where in _parts(text):
        for index in _chosen_layers(where, layers):
            chosen[index] = name
    return tuple(
        _static_format(name, index, layer, ranges) if name in STATIC else get_format(name)
        for index, (name, layer) in enumerate(zip(chosen, layers, strict=True))
    )


def format_id(formats: Sequence[KVFormat]) -> str:
    """One text for the formats of all layers, equal where they are: `f32`, `int8*2+bf16*3`."""
    runs = [(name, len(list(run))) for name, run in itertools.groupby(f.name for f in formats)]
    return runs[0][0] if len(runs) == 1 else "+".join(f"{name}*{count}" for name, count in runs)


def _parts(text: str) -> list[tuple[str, str]]:
    """Names, and for which layers; an empty text for all."""
    first, *others = (part.strip() for part in text.split(","))
    parts = [(first, "")]
    for part in others:
        where, equals, name = part.partition("=")
        if not equals or not where.strip():
            raise ValueError(f"KV format {text!r}: {part!r} must be LAYERS=FORMAT")
        parts.append((name.strip(), where.strip()))
    return parts


def _chosen_layers(where: str, layers: Sequence[LayerSpec]) -> list[int]:
    count = len(layers)
    if where in ("window", "full"):
        return [i for i in range(count) if (layers[i].window is not None) == (where == "window")]
    if not where:
        return list(range(count))
    number = _layer_number(where)
    if not -count <= number < count:
        raise ValueError(f"no layer {number}: the model has {count}")
    return [number % count]


def _layer_number(where: str) -> int:
    if re.fullmatch(r"-?[0-9]{1,6}", where) is None:
        raise ValueError(f"{where!r} must be `window`, `full` or a layer's number")
    return int(where)


def _static_format(
    name: str, index: int, layer: LayerSpec, ranges: KVRanges | None
) -> StaticFormat:
    if ranges is None:
        raise ValueError(f"format {name} needs scales that `calibrate` measured")
    largest = ranges.largest[index]
    if len(largest) != 2 * layer.kv_heads:
        raise ValueError(
            f"the KV ranges have {len(largest) // 2} KV heads in layer {index}, the model has "
            f"{layer.kv_heads}"
        )
    scales = tuple(x / largest_code(STATIC[name]) for x in largest)
    return StaticFormat(f"{name}@{ranges.id}", STATIC[name], scales)

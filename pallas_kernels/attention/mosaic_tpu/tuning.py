"""Block sizes of the TPU kernel, from a table per chip, or by rule if the table has no row.

The tables, `tuned/<chip>.json`, hold the sizes for which the compiler's schedule was best
(`jaxkv kernels` prints the schedule). A row has `tile` ("row" or "rows"), `dtype` and the sizes.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

TABLES = Path(__file__).parent / "tuned"
TileKind = Literal["row", "rows"]  # tiles of one query, tiles of many


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """Sizes of a call of the kernel.

    Attributes:
      block_bytes: bytes of K and V of a block, at most.
      block_tokens: keys of a block, at most; rounded to whole pages and registers.
      num_buffers: blocks in memory at once, a power of two; all but one are being fetched.
      groups_ahead: groups of KV heads whose first product is computed before the second product of
        a group.
      tile_rows: rows of a tile of many queries: queries times G.
    """

    block_bytes: int = 2 << 20
    block_tokens: int = 1024
    num_buffers: int = 2
    groups_ahead: int = 4
    tile_rows: int = 512


def block_sizes(kind: TileKind, dtype: str) -> BlockSizes:
    """Returns the sizes for the chip that the program is compiled for.

    Args:
      kind: tiles of one query or of many.
      dtype: name of the type of K and V in the pages.
    """
    for row in _table(_chip()):
        if (row["tile"], row["dtype"]) == (kind, dtype):
            sizes = BlockSizes(**{k: v for k, v in row.items() if k not in ("tile", "dtype")})
            break
    else:
        sizes = BlockSizes()
        if kind == "rows":  # the logits of one group fill the registers
            sizes = BlockSizes(block_tokens=512, groups_ahead=1)
    return sizes


def factor_type(codes: DTypeLike) -> DTypeLike | None:
    """Returns the type in which the chip multiplies codes of one byte without conversion.

    None if it cannot.
    """
    if not pltpu.is_tpu_device():
        return None
    info = pltpu.get_tpu_info()
    if jnp.issubdtype(codes, jnp.integer):
        return codes if info.int8_ops_per_second > 0 else None
    if codes == jnp.float8_e4m3fn and info.generation < 7:
        codes = jnp.float8_e4m3b11fnuz  # the same bits, four exponents lower
    return codes if info.generation >= 5 else None


def _chip() -> str:
    return str(pltpu.get_tpu_info().chip_version) if pltpu.is_tpu_device() else ""


@cache
def _table(chip: str) -> list[dict[str, Any]]:
    path = TABLES / f"{chip}.json"
    return json.loads(path.read_text()) if chip and path.is_file() else []

"""Block sizes of the TPU kernel: from a table a device, or by rule where it has no row.

The tables, `tuned/<chip>.json`, hold what the compiler's own schedule showed to be best
(`jaxkv kernels` prints it): rows of `tile` ("row" or "rows"), `dtype`, and the sizes.
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
Tile = Literal["row", "rows"]


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """Sizes of a call of the kernel.

    Attributes:
      block_bytes: of K and V of a block, the unit of work.
      block_tokens: keys of a block at most; rounded to whole pages and registers.
      num_buffers: blocks in memory at once, a power of two; all but one are being fetched.
      groups_ahead: groups of KV heads whose first product is taken ahead of a group's second one.
      tile_rows: query rows times G of a tile of many rows.
    """

    block_bytes: int = 2 << 20
    block_tokens: int = 1024
    num_buffers: int = 2
    groups_ahead: int = 4
    tile_rows: int = 512


def block_sizes(tile: Tile, dtype: str) -> BlockSizes:
    """Sizes for the chip that is compiled for.

    Args:
      tile: whether a tile is one query row or many.
      dtype: name of the type of K and V in the pages.
    """
    for row in _table(_chip()):
        if (row["tile"], row["dtype"]) == (tile, dtype):
            sizes = BlockSizes(**{k: v for k, v in row.items() if k not in ("tile", "dtype")})
            break
    else:
        sizes = BlockSizes()
        if tile == "rows":  # whose logits fill the registers by themselves
            sizes = BlockSizes(block_tokens=512, groups_ahead=1)
    return sizes


def factor_type(codes: DTypeLike) -> DTypeLike | None:
    """The type in which the chip that is compiled for multiplies codes of one byte as they are;
    None if it does not."""
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

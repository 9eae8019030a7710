"""How K and V lie in the pages of each layout, said a second time, by numpy."""

import numpy as np

from pallas_kernels import Layout


def stored(kv: np.ndarray, layout: Layout) -> np.ndarray:
    """`[..., P, 2K, D]`, K and V of a head by turns, as pages of a layout have it."""
    if layout == "head_major":
        return kv.swapaxes(-3, -2)
    rows = np.concatenate([kv[..., 0::2, :], kv[..., 1::2, :]], axis=-1)  # [..., P, K, 2D]
    pieces = rows.shape[-1] // 128 if rows.shape[-1] % 128 == 0 else 1
    return np.moveaxis(np.stack(np.split(rows, pieces, axis=-1), axis=-2), -4, -2)


def by_tokens(array: np.ndarray, layout: Layout) -> np.ndarray:
    """Undoes `stored`."""
    if layout == "head_major":
        return array.swapaxes(-3, -2)
    pieces = np.moveaxis(array, -2, -4)  # [..., P, K, X, L]
    rows = pieces.reshape(*pieces.shape[:-2], 2, -1)
    return rows.reshape(*rows.shape[:-3], -1, rows.shape[-1])

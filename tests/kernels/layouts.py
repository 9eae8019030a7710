"""How K and V lie in the pages of each layout, said a second time, by numpy."""

import numpy as np

from pallas_kernels import Layout


def stored(kv: np.ndarray, layout: Layout) -> np.ndarray:
    """`[..., P, 2K, D]`, K and V of a head by turns, as pages of a layout have it."""
    if layout == "token_major":
        return kv
    if layout == "head_major":
        return kv.swapaxes(-3, -2)
    return np.concatenate([kv[..., 0::2, :], kv[..., 1::2, :]], axis=-1).swapaxes(-3, -2)


def by_tokens(array: np.ndarray, layout: Layout) -> np.ndarray:
    """Undoes `stored`."""
    if layout == "token_major":
        return array
    kv = array.swapaxes(-3, -2)
    if layout == "paired":
        kv = np.stack(np.split(kv, 2, axis=-1), axis=-2)
        kv = kv.reshape(*kv.shape[:-3], -1, kv.shape[-1])
    return kv

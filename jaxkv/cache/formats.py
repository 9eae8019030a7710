"""KV formats: how a value is stored in a page, as a type.

A page's bytes are a function of the model, the format and the token prefix alone, so the format's
name is part of whatever identifies a page: the prefix index, an exported file.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclass(frozen=True)
class KVFormat:
    """One way of storing K and V.

    Attributes:
      name: what identifies it in messages, files and index namespaces.
      dtype: of the page array.
    """

    name: str
    dtype: DTypeLike

    def bytes_per_token(self, kv_heads: int, head_dim: int) -> int:
        """Bytes that K and V of one token take in one layer."""
        return 2 * kv_heads * head_dim * jnp.dtype(self.dtype).itemsize


FORMATS = {
    format.name: format
    for format in (
        KVFormat("f32", jnp.float32),
        KVFormat("bf16", jnp.bfloat16),
        KVFormat("f16", jnp.float16),
    )
}


def get_format(name: str) -> KVFormat:
    """Returns the format of that name; raises ValueError, listing all, where there is none."""
    if name not in FORMATS:
        raise ValueError(f"no KV format {name!r}; there are {', '.join(FORMATS)}")
    return FORMATS[name]

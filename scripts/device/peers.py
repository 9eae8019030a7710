"""Decode attention of other systems on the inputs of `device check`, where installed.

A peer takes an `Input` and returns a function without arguments that attends once and returns
`[B, H, D]`; if it cannot, it raises `Unavailable` with the reason. This module is not a command.
"""

import functools
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.arith import ceil_div
from pallas_kernels import AnyPages, Pages, ragged_paged_attention


@dataclass(frozen=True)
class Jitted:
    """Returns a call of a jitted function."""

    function: Any
    arrays: tuple[Any, ...]

    def __call__(self) -> jax.Array:
        return self.function(*self.arrays)


Attend = Jitted | Callable[[], Any]


class Unavailable(Exception):
    """Why a system cannot run here, or not on this input."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """A decode step: one query per sequence.

    Attributes:
      q: `[B, H, D]`.
      pages: head-major pages.
      table: `[B, M]`.
      lens: lengths of the B sequences.
    """

    q: jax.Array
    pages: AnyPages
    table: jax.Array
    lens: tuple[int, ...]

    @property
    def scale(self) -> float:
        """The factor on q.k."""
        return self.q.shape[-1] ** -0.5

    @property
    def kv_lens(self) -> jax.Array:
        """The lengths as a `[B]` array."""
        return jnp.asarray(self.lens, jnp.int32)

    def heads_apart(self, layout: str) -> tuple[jax.Array, jax.Array]:
        """Returns K and V of float pages, `[N, K, P, D]` with its axes in the order of `layout`."""
        if not isinstance(self.pages, Pages):
            raise Unavailable("takes no codes with a scale per token")
        kv = self.pages.kv
        order = tuple("NKPD".index(axis) for axis in layout)
        return kv[:, 0::2].transpose(order), kv[:, 1::2].transpose(order)


def ours(backend: str) -> Callable[[Input], Attend]:
    """A backend of `pallas_kernels`."""

    def prepare(given: Input) -> Attend:
        B = len(given.lens)
        starts = jnp.arange(B + 1, dtype=jnp.int32)
        arrays = given.q, given.pages, given.table, given.kv_lens, starts
        attend = functools.partial(ragged_paged_attention, scale=given.scale, backend=backend)
        return Jitted(jax.jit(attend), arrays)

    return prepare


def jax_triton(given: Input) -> Attend:
    """JAX's own paged attention for GPUs, deprecated since 0.11."""
    k, v = given.heads_apart("KNPD")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")
    M = given.table.shape[1]
    splits = next(n for n in (16, 8, 4, 2, 1) if M % n == 0)
    block = next(n for n in (8, 4, 2, 1) if (M // splits) % n == 0)
    q = given.q * jnp.asarray(given.scale, given.q.dtype)

    def attend(*arrays: jax.Array) -> jax.Array:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return module.paged_attention(*arrays, k_splits=splits, pages_per_compute_block=block)

    return Jitted(jax.jit(attend), (q, k, v, given.table, given.kv_lens))


def cudnn(given: Input) -> Attend:
    """cuDNN's attention over dense K and V, without pages."""
    k, v = (x[given.table] for x in given.heads_apart("NPKD"))  # [B, M, P, K, D]
    B, M, P, K, D = k.shape
    k, v = (x.reshape(B, M * P, K, D) for x in (k, v))

    def attend(q: Any, k: Any, v: Any, q_lens: Any, lens: Any) -> jax.Array:
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=given.scale,
            query_seq_lengths=q_lens,
            key_value_seq_lengths=lens,
            implementation="cudnn",
        )[:, 0]

    arrays = given.q[:, None], k, v, jnp.ones((B,), jnp.int32), given.kv_lens
    return Jitted(jax.jit(attend), arrays)


def flash_infer(given: Input) -> Attend:
    """FlashInfer's batch decode, planned beforehand."""
    torch, flashinfer = _torch("flashinfer")
    k, v = (torch.from_dlpack(x) for x in given.heads_apart("NPKD"))
    P, (_, H, D), K = given.pages.page_size, given.q.shape, given.pages.num_kv_heads
    pages = [ceil_div(n, P) for n in given.lens]
    table = np.asarray(given.table)
    ids = np.concatenate([row[:n] for row, n in zip(table, pages, strict=True)])

    def int32(values: Any) -> Any:
        return torch.tensor(np.asarray(values), dtype=torch.int32, device="cuda")

    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        int32(np.cumsum([0, *pages])),
        int32(ids),
        int32([(n - 1) % P + 1 for n in given.lens]),
        H,
        K,
        D,
        P,
        sm_scale=given.scale,
        q_data_type=k.dtype,
        kv_data_type=k.dtype,
    )
    q = torch.from_dlpack(given.q)
    return lambda: wrapper.run(q, (k, v))


def flash_attention(given: Input) -> Attend:
    """FlashAttention-3 over pages."""
    torch, module = _torch("flash_attn_interface")
    k, v = (torch.from_dlpack(x) for x in given.heads_apart("NPKD"))
    q, table, lens = (torch.from_dlpack(x) for x in (given.q[:, None], given.table, given.kv_lens))
    return lambda: module.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lens, page_table=table, causal=True, softmax_scale=given.scale
    )[:, 0]


def _torch(name: str) -> tuple[Any, Any]:
    """Imports torch with CUDA, and one more module."""
    try:
        torch, module = importlib.import_module("torch"), importlib.import_module(name)
    except Exception as error:  # a package built for another torch fails in many ways
        raise Unavailable(f"not importable: {error}".splitlines()[0]) from None
    if not torch.cuda.is_available():
        raise Unavailable("torch has no CUDA")
    return torch, module


SYSTEMS: dict[str, Callable[[Input], Attend]] = {
    "mosaic_gpu": ours("mosaic_gpu"),
    "xla": ours("xla"),
    "jax triton": jax_triton,
    "cudnn, dense": cudnn,
    "flashinfer": flash_infer,
    "flash-attention 3": flash_attention,
}

"""Named shapes to compile kernels for: those of this package, and JAX's own to compare with.

A name has all sizes:

    decode-bf16-h32-k8-d128-p16     step, type of K and V, H, K, D, P
    prefill-bf16-h32-k8-d128-p16    512 queries of 4 sequences
    mixed-...                       64 sequences of one query, and 448 queries of others
    decode-bf16-h8-k1-d256-p16-w512 with a window
    decode-int8-h32-k8-d128-p64     codes (int8, e4m3, e5m2) with a scale per token and head, or
                                    (int4) with a scale and a minimum
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import api, mosaic_gpu, mosaic_tpu
from pallas_kernels.page_write import write_pages
from pallas_kernels.pages import Layout, Pages, numbers_shape, pool_shape
from pallas_kernels.quantised_pages import AffinePages, SymmetricPages, TokenPages

NAMES = (
    "decode-bf16-h32-k8-d128-p16",
    "decode-bf16-h32-k8-d128-p64",
    "decode-bf16-h8-k1-d128-p16",
    "decode-bf16-h16-k16-d128-p16",
    "decode-bf16-h32-k8-d128-p16-w1024",
    "prefill-bf16-h32-k8-d128-p16",
    "mixed-bf16-h32-k8-d128-p64",
    *(f"decode-bf16-h16-k4-d{D}-p16" for D in (64, 80, 96, 192, 256)),
    *(f"decode-bf16-h15-k5-d128-p{P}" for P in (8, 32, 128, 256)),
    "decode-f32-h9-k3-d64-p16",
    *(f"decode-{codes}-h32-k8-d128-p64" for codes in ("int8", "e4m3", "e5m2", "int4")),
    "decode-int8-h32-k8-d128-p16",
)
POOL_TOKENS, TABLE_TOKENS = 65_536, 32_768
STEPS = {"decode": (64, 64), "mixed": (512, 68), "prefill": (512, 4)}  # T and B
DTYPES = {
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "f32": jnp.float32,
    "int8": jnp.int8,
    "e4m3": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
    "int4": jnp.uint8,  # two codes per byte
}
_NAME = re.compile(
    rf"({'|'.join(STEPS)})-({'|'.join(DTYPES)})-h(\d+)-k(\d+)-d(\d+)-p(\d+)(?:-w(\d+))?"
)


@dataclass(frozen=True)
class Shape:
    """A named shape; the README's glossary explains the letters."""

    name: str
    T: int
    B: int
    dtype: Any
    H: int
    K: int
    D: int
    P: int
    window: int | None

    @classmethod
    def parse(cls, name: str) -> "Shape":
        """Reads a name.

        Raises:
          ValueError: it is not a name of a shape.
        """
        found = _NAME.fullmatch(name)
        if not found:
            raise ValueError(f"no shape is named {name!r}; one is decode-bf16-h32-k8-d128-p16")
        step, dtype, *numbers = found.groups()
        H, K, D, P = map(int, numbers[:4])
        if not (H and K and D and P) or H % K:
            raise ValueError(f"{name}: H, K, D and P are above 0, and H is a multiple of K")
        if P > POOL_TOKENS:
            raise ValueError(f"{name}: P is at most {POOL_TOKENS}, the tokens of the pool")
        window = None if numbers[4] is None else int(numbers[4])
        if window == 0:
            raise ValueError(f"{name}: a window is above 0")
        return cls(name, *STEPS[step], DTYPES[dtype], H, K, D, P, window)

    @property
    def has_codes(self) -> bool:
        """K and V are codes, with parameters per token and head."""
        return jnp.dtype(self.dtype).itemsize == 1

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of a token, without padding."""
        parameters = 4 if self.has_codes else 0
        codes = self.D // 2 if self.dtype == jnp.uint8 else self.D
        return 2 * self.K * (codes * jnp.dtype(self.dtype).itemsize + parameters)

    @property
    def q(self) -> jax.ShapeDtypeStruct:
        """The queries: float32 if the pages are, else bfloat16."""
        dtype = jnp.float32 if self.dtype == jnp.float32 else jnp.bfloat16
        return jax.ShapeDtypeStruct((self.T, self.H, self.D), dtype)

    def pages(self, layout: Layout) -> TokenPages:
        """Returns the pool."""
        N = POOL_TOKENS // self.P
        row_size = self.D // 2 if self.dtype == jnp.uint8 else self.D
        pool = pool_shape(layout, N, self.P, self.K, row_size)
        kv: Any = jax.ShapeDtypeStruct(pool, self.dtype)
        if not self.has_codes:
            return Pages(kv=kv, layout=layout)
        of_token = numbers_shape(layout, N, self.P, 2 * self.K)
        if self.dtype == jnp.uint8:
            parameters: Any = jax.ShapeDtypeStruct(of_token, jnp.uint32)
            return AffinePages(kv=kv, parameters=parameters, layout=layout)
        scales: Any = jax.ShapeDtypeStruct(of_token, jnp.float32)
        return SymmetricPages(kv=kv, scales=scales, layout=layout)

    def batch(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the page table, the lengths, and the starts of the queries."""
        return _int32(self.B, TABLE_TOKENS // self.P), _int32(self.B), _int32(self.B + 1)


@dataclass(frozen=True)
class Case:
    """A program to compile.

    Attributes:
      function: the program.
      arguments: the types of its arguments; the first is the pool.
      donates: the pool is donated and returned.
      pool_bytes: bytes of the pool.
      block_tokens: keys of a trip of the kernel's inner loop.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donates: bool
    pool_bytes: int
    block_tokens: int


def ours(shape: Shape, backend: str) -> Case:
    """Returns a step of a backend: it writes the tokens' K and V, then computes attention."""
    on_gpu = backend == "mosaic_gpu"
    pages = shape.pages("head_major" if on_gpu else "paired")
    writer = "xla" if on_gpu and shape.has_codes else backend
    new = jax.ShapeDtypeStruct((shape.T, shape.K, shape.D), shape.q.dtype)

    def step(pages: Any, q: Any, k: Any, v: Any, slots: Any, *batch: Any) -> Any:
        pages = write_pages(pages, k, v, slots, backend=writer)
        out = api.ragged_paged_attention(
            q,
            pages,
            *batch,
            scale=shape.D**-0.5,
            window=shape.window,
            backend=backend,
        )
        return pages, out

    if on_gpu:
        block_tokens = mosaic_gpu.block_tokens(shape.D)
    else:
        block_tokens = mosaic_tpu.block_tokens(pages, "rows" if shape.T > shape.B else "row")
    return Case(
        function=step,
        arguments=(pages, shape.q, new, new, _int32(shape.T), *shape.batch()),
        donates=True,
        pool_bytes=sum(array.size * array.dtype.itemsize for array in pages.paged.values()),
        block_tokens=block_tokens,
    )


def peer(shape: Shape) -> Case:
    """Returns JAX's own ragged paged attention over written pages, with 512 keys per trip.

    Raises:
      ValueError: the shape has codes.
    """
    if shape.has_codes:
        raise ValueError("it takes no pages of codes")
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    pool = jax.ShapeDtypeStruct(
        (POOL_TOKENS // shape.P, shape.P, 2 * shape.K, shape.D), shape.dtype
    )
    block_pages = max(1, 512 // shape.P)

    def attend(pool: Any, q: Any, table: Any, lens: Any, starts: Any, count: Any) -> Any:
        return ragged_paged_attention(
            q,
            pool,
            lens,
            table,
            starts,
            count,
            sm_scale=shape.D**-0.5,
            sliding_window=shape.window,
            num_kv_pages_per_block=block_pages,
            num_queries_per_block=8 if shape.T <= shape.B else 128,
            vmem_limit_bytes=64 << 20,
        )

    table, lens, starts = shape.batch()
    return Case(
        function=attend,
        arguments=(pool, shape.q, table, lens, starts, _int32(1)),
        donates=False,
        pool_bytes=pool.size * pool.dtype.itemsize,
        block_tokens=block_pages * shape.P,
    )


GPU_KERNELS = {"mosaic_gpu": functools.partial(ours, backend="mosaic_gpu")}
TPU_KERNELS = {"mosaic_tpu": functools.partial(ours, backend="mosaic_tpu"), "jax_rpa": peer}
KERNELS = GPU_KERNELS | TPU_KERNELS


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)

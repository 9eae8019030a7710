"""Each argument that does not fit is refused at the door, in a message that names what is wrong."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    AffinePages,
    Pages,
    SharedPrefixes,
    copy_pages,
    merge_partials,
    ragged_paged_attention,
    write_pages,
)

T, B, M, N, H, K, D, P = 5, 2, 3, 8, 4, 2, 16, 8


def pages(P=P, K2=2 * K, D=D, N=N, layout="head_major", dtype=jnp.float32) -> Pages:
    return Pages(kv=jnp.zeros((N, K2, P, D), dtype), layout=layout)


def floats(*shape: int, dtype=jnp.float32) -> jnp.ndarray:
    return jnp.zeros(shape, dtype)


def ints(*shape: int) -> jnp.ndarray:
    return jnp.zeros(shape, jnp.int32)


BAD_PAGES = {
    "P 7": (dict(pages=pages(P=7)), r"P = 7"),
    "P 512": (dict(pages=pages(P=512)), r"P = 512"),
    "no page": (dict(pages=pages(N=0)), r"N = 0"),
    "odd 2K": (dict(pages=pages(K2=3)), r"2K .* 3"),
    "no heads": (dict(pages=pages(K2=0)), r"2K .* 0"),
    "five dims": (
        dict(pages=Pages(kv=floats(1, N, P, 2 * K, D))),
        r"pages\.kv.*\(1, 8, 8, 4, 16\)",
    ),
    "halves of registers, paired": (
        dict(pages=Pages(kv=floats(N, K, 2, P, 64), layout="paired")),
        r"last axis of pages\.kv must be 128, got 64",
    ),
    "2 bits, paired": (
        dict(
            pages=AffinePages(
                kv=jnp.zeros((N, K, 1, P, 64), jnp.uint8),
                parameters=jnp.zeros((N, 2 * K, P), jnp.uint32),
                bits=2,
                layout="paired",
            )
        ),
        r"bits must be 4, got 2",
    ),
    "int8 pages": (dict(pages=pages(dtype=jnp.int8)), r"pages\.kv.*int8"),
    "layout": (dict(pages=pages(layout="paged")), r"layout.*'paged'"),
}

BAD_ATTENTION = BAD_PAGES | {
    "list for q": (dict(q=[[1.0]]), r"q must be an array, got list"),
    "list for kv_lens": (dict(kv_lens=[1, 2]), r"kv_lens must be an array, got list"),
    "array for pages": (dict(pages=floats(2, 8, 4, 16)), r"pages must be Pages"),
    "list in pages": (dict(pages=Pages(kv=[1.0])), r"pages\.kv must be an array, got list"),
    "device scale": (dict(scale=jnp.float32(0.3)), r"scale must be finite and static"),
    "NaN scale": (dict(scale=float("nan")), r"scale must be finite"),
    "half a window": (dict(window=2.5), r"window must be positive, whole"),
    "huge window": (dict(window=2**40), r"window must be positive, whole"),
    "half a tile": (dict(query_tile=1.5), r"query_tile must be positive, whole"),
    "infinite cap": (dict(soft_cap=float("inf")), r"soft_cap must be positive, finite"),
    "a word for keys": (dict(keys="all"), r"keys must be a KeyPart"),
    "D 4": (dict(pages=pages(D=4), q=floats(T, H, 4)), r"D = 4"),
    "D 520": (dict(pages=pages(D=520), q=floats(T, H, 520)), r"D = 520"),
    "q of two dims": (dict(q=floats(T, H * D)), r"q must be \[T, H, D\].*\(5, 64\)"),
    "no row": (dict(q=floats(0, H, D)), r"T = 0"),
    "no head": (dict(q=floats(T, 0, D)), r"H = 0"),
    "int q": (dict(q=jnp.zeros((T, H, D), jnp.int32)), r"q must be float32.*int32"),
    "D of q": (dict(q=floats(T, H, 32)), r"D of q is 32.* 16"),
    "H not in groups": (dict(q=floats(T, 3, D)), r"H = 3 .*K = 2"),
    "table of one dim": (dict(page_table=ints(M)), r"page_table must be \[B, M\].*\(3,\)"),
    "B 0": (dict(page_table=ints(0, M), kv_lens=ints(0), query_starts=ints(1)), r"B >= 1"),
    "M 0": (dict(page_table=ints(B, 0)), r"M >= 1"),
    "int64 table": (dict(page_table=np.zeros((B, M), np.int64)), r"page_table.*int32.*int64"),
    "float kv_lens": (dict(kv_lens=floats(B)), r"kv_lens.*int32.*float32"),
    "int16 starts": (dict(query_starts=jnp.zeros(B + 1, jnp.int16)), r"query_starts.*int32.*int16"),
    "B of kv_lens": (dict(kv_lens=ints(3)), r"kv_lens must be \[B\] = \[2\].*\(3,\)"),
    "B of starts": (dict(query_starts=ints(B)), r"query_starts must be \[B \+ 1\] = \[3\].*\(2,\)"),
    "H of sinks": (dict(sinks=floats(K)), r"sinks must be \[H\] = \[4\].*\(2,\)"),
    "bf16 sinks": (dict(sinks=floats(H, dtype=jnp.bfloat16)), r"sinks.*float32.*bfloat16"),
    "window 0": (dict(window=0), r"window.*0"),
    "window True": (dict(window=True), r"window.*True"),
    "shared tuple": (dict(shared=(1, 2)), r"shared must be SharedPrefixes, got tuple"),
    "shared without groups": (
        dict(shared=SharedPrefixes(starts=ints(1), lengths=ints(0))),
        r"shared\.lengths has R = 0 groups",
    ),
    "negative window": (dict(window=-4), r"window.*-4"),
    "soft_cap 0": (dict(soft_cap=0.0), r"soft_cap.*0\.0"),
    "negative soft_cap": (dict(soft_cap=-1.0), r"soft_cap.*-1"),
    "query_tile 0": (dict(query_tile=0), r"query_tile.*0"),
    "unknown backend": (dict(backend="cuda"), r"ragged_paged_attention.*'cuda'.*reference.*xla"),
}

BAD_WRITE = BAD_PAGES | {
    "D 4": (dict(pages=pages(D=4)), r"D = 4"),
    "K of k": (dict(k=floats(T, 3, D)), r"k must be \[T, K, D\] = \(5, 2, 16\).*\(5, 3, 16\)"),
    "T of v": (dict(v=floats(4, K, D)), r"v must be \[T, K, D\] = \(5, 2, 16\).*\(4, 2, 16\)"),
    "D of v": (dict(v=floats(T, K, 8)), r"v must be \[T, K, D\]"),
    "int k": (dict(k=ints(T, K, D)), r"k must be .*float.*int32"),
    "slots of two dims": (dict(slots=ints(T, 1)), r"slots must be \[T\].*\(5, 1\)"),
    "int64 slots": (dict(slots=np.zeros(T, np.int64)), r"slots.*int32.*int64"),
    "unknown backend": (dict(backend="cuda"), r"write_pages.*'cuda'"),
}

BAD_COPY = BAD_PAGES | {
    "scalar source": (dict(source=ints()), r"source must be \[n\].*\(\)"),
    "float target": (dict(target=floats(2)), r"target.*int32.*float32"),
    "lengths": (dict(target=ints(3)), r"source.*\(2,\).*target.*\(3,\)"),
    "unknown backend": (dict(backend="cuda"), r"copy_pages.*'cuda'"),
}

BAD_MERGE = {
    "lse of another shape": (dict(lse_a=floats(3)), r"lse_a.*\(2,\).*\(3,\)"),
    "outputs of two shapes": (dict(out_b=floats(2, 8)), r"out_b.*\(2, 8\).*\(2, 16\)"),
}


def cases(table: dict) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("change, message", table.values(), ids=table.keys())


def good_attention() -> dict:
    return dict(
        q=floats(T, H, D),
        pages=pages(),
        page_table=ints(B, M),
        kv_lens=ints(B),
        query_starts=ints(B + 1),
        scale=1.0,
    )


@cases(BAD_ATTENTION)
def test_attention_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(**(good_attention() | change))


@cases(BAD_WRITE)
def test_a_write_refuses(change, message):
    good = dict(pages=pages(), k=floats(T, K, D), v=floats(T, K, D), slots=ints(T))
    with pytest.raises(ValueError, match=message):
        write_pages(**(good | change))


@cases(BAD_COPY)
def test_a_copy_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        copy_pages(**(dict(pages=pages(), source=ints(2), target=ints(2)) | change))


@cases(BAD_MERGE)
def test_a_merge_refuses(change, message):
    good = dict(out_a=floats(2, D), lse_a=floats(2), out_b=floats(2, D), lse_b=floats(2))
    with pytest.raises(ValueError, match=message):
        merge_partials(**(good | change))

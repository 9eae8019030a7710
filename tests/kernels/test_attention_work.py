"""How much the xla backend computes and reads: what is live, and nothing for what is not."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Literal

from pallas_kernels import Pages, ragged_paged_attention
from pallas_kernels.attention.xla import KV_CHUNK

H, K, D, P, N = 16, 2, 64, 16, 64


def shapes(B: int, T: int, M: int, K: int = K) -> tuple:
    """The arguments of a call, without their values."""
    return (
        jax.ShapeDtypeStruct((T, H, D), jnp.float32),
        Pages(kv=jax.ShapeDtypeStruct((N, 2 * K, P, D), jnp.float32)),
        *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((B, M), (B,), (B + 1,))),
    )


def attention(**options) -> Callable:
    return functools.partial(ragged_paged_attention, scale=0.125, backend="xla", **options)


@functools.cache
def compiled(*, T: int, M: int, K: int = K) -> jax.stages.Compiled:
    return jax.jit(attention()).lower(*shapes(8, T, M, K)).compile()


@pytest.mark.parametrize("T", [8, 200], ids=["decode", "prefill"])
def test_a_wider_table_costs_no_more_than_its_own_bytes(T):
    narrow, wide = compiled(T=T, M=8, K=K), compiled(T=T, M=512, K=K)
    costs, wide_costs = narrow.cost_analysis(), wide.cost_analysis()
    table_bytes = 8 * (512 - 8) * 4
    assert wide_costs["flops"] == costs["flops"]
    # The table is read, and the rows of a group of tiles are gathered from it.
    assert wide_costs["bytes accessed"] - costs["bytes accessed"] <= 4 * table_bytes
    growth = wide.memory_analysis().temp_size_in_bytes - narrow.memory_analysis().temp_size_in_bytes
    assert growth <= 2 * table_bytes


def test_query_heads_that_share_a_kv_head_do_not_repeat_it():
    shared, each = (compiled(T=8, M=8, K=heads).cost_analysis() for heads in (K, H))
    chunk_bytes = 8 * KV_CHUNK * 2 * D * 4  # of one KV head, of eight tiles of one row
    assert shared["flops"] <= each["flops"]
    # What the other KV heads cost: every chunk is at least gathered, converted and multiplied.
    assert each["bytes accessed"] - shared["bytes accessed"] >= (H - K) * 3 * chunk_bytes


# XLA's analysis counts the body of a loop once. To count trips, the traced program is run again
# with one more value in every loop's state: the elements that have been gathered from the pool.


def run_counting(program: ClosedJaxpr, arguments: Sequence, pool: tuple[int, ...]) -> tuple:
    """Outputs of a program, and how many elements it gathered from an array of shape `pool`."""
    values = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    values |= dict(zip(program.jaxpr.invars, arguments, strict=True))
    count = jnp.int32(0)
    for eqn in program.jaxpr.eqns:
        inputs = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        if eqn.primitive.name == "while":
            outputs, more = run_while(eqn.params, inputs, pool)
        elif isinstance(eqn.params.get("jaxpr"), ClosedJaxpr):
            outputs, more = run_counting(eqn.params["jaxpr"], inputs, pool)
        else:
            assert not any(isinstance(p, ClosedJaxpr) for p in eqn.params.values()), eqn.primitive
            outputs = eqn.primitive.bind(*inputs, **eqn.params)
            outputs = outputs if eqn.primitive.multiple_results else [outputs]
            reads = eqn.primitive.name in ("gather", "dynamic_slice") and inputs[0].shape == pool
            more = outputs[0].size if reads else 0
        count += jnp.int32(more)
        values |= dict(zip(eqn.outvars, outputs, strict=True))
    return [v.val if isinstance(v, Literal) else values[v] for v in program.jaxpr.outvars], count


def run_while(params: dict, inputs: list, pool: tuple[int, ...]) -> tuple:
    at_cond, at_body = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    for_cond, for_body, state = inputs[:at_cond], inputs[at_cond:at_body], inputs[at_body:]

    def proceed(carry):
        return run_counting(params["cond_jaxpr"], [*for_cond, *carry[0]], pool)[0][0]

    def body(carry):
        state, more = run_counting(params["body_jaxpr"], [*for_body, *carry[0]], pool)
        return state, carry[1] + more

    return jax.lax.while_loop(proceed, body, (state, jnp.int32(0)))


def counter(*, B: int, T: int, M: int = 1024, **options) -> Callable[..., int]:
    """A function of kv_lens and q_lens: how many keys one call reads, each time it does."""
    arguments = shapes(B, T, M)
    program = jax.make_jaxpr(attention(**options))(*arguments)
    zeros = [jnp.zeros(x.shape, x.dtype) for x in jax.tree.leaves(arguments)[:3]]
    pool = (N, 2 * K, 1, P * D)  # a page of 16 tokens is read as one run
    count = jax.jit(lambda *arrays: run_counting(program, arrays, pool)[1])

    def keys_read(kv_lens: Sequence[int], q_lens: Sequence[int]) -> int:
        starts = [sum(q_lens[:b]) for b in range(B + 1)]
        return int(count(*zeros, jnp.int32(kv_lens), jnp.int32(starts))) // (2 * K * D)

    return keys_read


def in_chunks(keys: int) -> int:
    return -(-keys // KV_CHUNK) * KV_CHUNK


def test_decode_reads_no_further_than_the_longest_context():
    keys_read = counter(B=8, T=8)
    for longest in (0, 1, 128, 129, 1000, 16384):
        kv_lens = [min(longest, n) for n in (7, 0, 1, 128, 5, 16384, 3, 100)]
        assert sum(kv_lens) <= keys_read(kv_lens, [1] * 8) <= 8 * in_chunks(longest)


def test_decode_within_a_window_reads_no_more_at_any_context():
    keys_read = counter(B=8, T=8, window=100)
    for context in (100, 1000, 16384):
        assert 8 * 100 <= keys_read([context] * 8, [1] * 8) <= 8 * 2 * KV_CHUNK


def test_prefill_reads_for_each_tile_what_lies_before_its_end():
    keys_read = counter(B=3, T=600)
    assert keys_read([0, 0, 0], [0, 0, 0]) == 0
    assert keys_read([16384, 9000, 400], [0, 0, 0]) == 0  # cached, but nothing is asked
    ends = range(64, 513, 64)  # of eight tiles, which may be taken two at a time
    for before in (0, 1000):
        read = keys_read([before + 512, 0, 0], [512, 0, 0])
        assert sum(before + end for end in ends) <= read
        assert read <= sum(in_chunks(before + end + 64) for end in ends)
        assert keys_read([before + 512, 16384, 0], [512, 0, 0]) == read

"""How much the xla backend computes and reads: what is live, and nothing for what is not."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import Pages, ragged_paged_attention
from pallas_kernels.attention.xla import KV_CHUNK

D, P, N = 64, 16, 64


def compiled(T: int, M: int, H: int = 16, K: int = 2, B: int = 8) -> jax.stages.Compiled:
    arrays = (
        jax.ShapeDtypeStruct((T, H, D), jnp.float32),
        Pages(kv=jax.ShapeDtypeStruct((N, P, 2 * K, D), jnp.float32)),
        *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((B, M), (B,), (B + 1,))),
    )
    call = functools.partial(ragged_paged_attention, scale=0.125, backend="xla")
    return jax.jit(call).lower(*arrays).compile()


@pytest.mark.parametrize("T", [8, 200], ids=["decode", "prefill"])
def test_a_wider_table_costs_no_more_than_its_own_bytes(T):
    narrow, wide = compiled(T, 8), compiled(T, 512)
    costs, wide_costs = narrow.cost_analysis(), wide.cost_analysis()
    table_bytes = 8 * (512 - 8) * 4
    assert wide_costs["flops"] == costs["flops"]
    # The table is read, and the rows of a group of tiles are gathered from it.
    assert wide_costs["bytes accessed"] - costs["bytes accessed"] <= 4 * table_bytes
    growth = wide.memory_analysis().temp_size_in_bytes - narrow.memory_analysis().temp_size_in_bytes
    assert growth <= 2 * table_bytes


def test_query_heads_that_share_a_kv_head_do_not_repeat_it():
    shared, each = (compiled(8, 8, K=K).cost_analysis() for K in (1, 16))
    chunk_bytes = 8 * KV_CHUNK * 2 * D * 4  # of one KV head, of eight tiles of one row
    assert shared["flops"] <= each["flops"]
    # What the other fifteen heads cost: every chunk is at least gathered, masked and multiplied.
    assert each["bytes accessed"] - shared["bytes accessed"] >= 15 * 3 * chunk_bytes


Count = Callable[[Sequence[int], Sequence[int]], int]


@pytest.fixture
def count_keys(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Count]:
    """Makes counters of the keys that the compiled loops gather as they run.

    XLA's own analysis counts the body of a loop once; this counts its trips. The sizes are this
    module's own, so that no trace of another test is run, and none is left for it.
    """

    def counter(B: int, T: int, M: int = 1024, **options) -> Count:
        gathered: list[int] = []
        gather = Pages.tokens

        def counted(self: Pages, page_ids: jax.Array, offsets: jax.Array) -> jax.Array:
            jax.debug.callback(lambda: gathered.append(page_ids.size))
            return gather(self, page_ids, offsets)

        call = jax.jit(
            functools.partial(ragged_paged_attention, scale=1.0, backend="xla", **options)
        )
        q, pages = jnp.zeros((T, 2, 8)), Pages(kv=jnp.zeros((2, P, 2, 8)))
        table = jnp.zeros((B, M), jnp.int32)

        def count(kv_lens: Sequence[int], q_lens: Sequence[int]) -> int:
            gathered.clear()
            starts = [sum(q_lens[:b]) for b in range(B + 1)]
            with monkeypatch.context() as patch:
                patch.setattr(Pages, "tokens", counted)
                arrays = (jnp.asarray(x, jnp.int32) for x in (kv_lens, starts))
                call(q, pages, table, *arrays).block_until_ready()
            jax.effects_barrier()
            return sum(gathered)

        return count

    return counter


def test_decode_gathers_the_chunks_of_the_longest_context_and_no_more(count_keys):
    count = count_keys(B=8, T=8)
    for longest, chunks in ((0, 0), (1, 1), (128, 1), (129, 2), (1000, 8), (16384, 128)):
        kv_lens = [min(longest, n) for n in (7, 0, 1, 128, 5, 16384, 3, 100)]
        assert count(kv_lens, [1] * 8) == chunks * 8 * KV_CHUNK


def test_decode_within_a_window_gathers_no_more_at_any_context(count_keys):
    count = count_keys(B=8, T=8, window=100)
    for context in (100, 1000, 16384):
        assert count([context] * 8, [1] * 8) <= 2 * 8 * KV_CHUNK


def test_prefill_gathers_for_each_tile_what_lies_before_it(count_keys):
    count = count_keys(B=3, T=600)
    assert count([0, 0, 0], [0, 0, 0]) == 0
    assert count([16384, 9000, 400], [0, 0, 0]) == 0  # cached, but asked nothing
    # Eight tiles of 64 rows, each of which walks the chunks up to its own last row.
    chunks = sum(-(-end // KV_CHUNK) for end in range(64, 513, 64))
    for other in (0, 16384):
        assert count([512, other, 0], [512, 0, 0]) == chunks * KV_CHUNK
    assert count([1512, 0, 0], [512, 0, 0]) == KV_CHUNK * sum(
        -(-end // KV_CHUNK) for end in range(1064, 1513, 64)
    )

"""Scores and choices of every method, against a token at a time in float64."""

from fractions import Fraction
from functools import cache, partial

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.compress import METHODS, SCORES, WINDOWS, Budget, Compression, num_protected
from jaxkv.compress.compressor import _choose_in_layer
from jaxkv.compress.method import FORCED, LayerTokens, Queries, ranks
from jaxkv.compress.pyramidkv import PyramidKV
from jaxkv.models import rope
from jaxkv.models.config import RopeConfig
from tests.compress import naive_scores

H, K, D = 4, 2, 8
ROPE = RopeConfig(theta=100.0)
PADDED = 40  # slots behind the tokens


def method_of(name: str):
    return Compression(method=name, budget=Budget.parse("0.5")).score_method()


def turned(x: np.ndarray, by: int) -> np.ndarray:
    """A vector rotated on by some positions, pairs as complex numbers."""
    half = len(x) // 2
    z = (x[:half] + 1j * x[half:]) * np.exp(1j * by * 100.0 ** (-np.arange(half) / half))
    return np.concatenate([z.real, z.imag])


@cache
def tensors(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(n)
    q = 0.5 * rng.standard_normal((n, H, D))
    k, v = rng.standard_normal((2, K, n, D))
    k[:, : n // 3] *= 1.7  # so that norms and weights differ
    return dict(q=q, k=k, v=v)


def layer_of(n: int, num_slots: int | None = None) -> LayerTokens:
    parts = tensors(n)
    S = num_slots or n + PADDED
    k, v = (np.zeros((K, S, D), np.float32) for _ in "kv")
    k[:, :n], v[:, :n] = parts["k"], parts["v"]
    return LayerTokens(
        k=jnp.asarray(k),
        v=jnp.asarray(v),
        lens=jnp.full(K, n, jnp.int32),
        num_tokens=jnp.int32(n),
        layer=jnp.int32(0),
        turn=partial(rope.turn, ROPE),
    )


def scores_of(name: str, n: int, keep: int, cap: float | None = None, chunk: int = 64):
    """A method's scores `[K, S]` of n tokens, its queries looked at chunk by chunk."""
    method, layer = method_of(name), layer_of(n)
    first = 0 if method.num_queries is None else max(0, n - method.num_queries)
    seen = {}
    for start in range(first, n, chunk):
        end = min(n, start + chunk)
        positions = np.full(chunk, -(2**30), np.int32)
        positions[: end - start] = range(start, end)
        q = np.full((chunk, H, D), 3.0, np.float32)  # rows that are none
        q[: end - start] = tensors(n)["q"][start:end]
        rows = jnp.asarray(positions)
        queries = Queries(jnp.asarray(q), rows, jnp.broadcast_to(rows, (K, chunk)), cap)
        more = method.look(queries, layer)
        seen = {x: seen[x] + more[x] for x in more} if seen else more
    return method, layer, seen, method.score(layer, seen, jnp.int32(keep))


@pytest.mark.parametrize("n", [5, 70, pytest.param(129, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(naive_scores.SCORES))
def test_each_score_is_that_of_a_token_at_a_time_in_float64(name, n):
    keep = n // 2
    _, _, _, scores = scores_of(name, n, keep)
    want = naive_scores.SCORES[name](**tensors(n), cap=None, keep=keep, turned=turned)
    got = np.where(scores[:, :n] == np.float32(FORCED), np.inf, scores[:, :n])
    chex.assert_trees_all_close(got, want, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["tova", "snapkv", "h2o"])
def test_weights_follow_a_soft_cap(name):
    _, _, _, scores = scores_of(name, 70, 30, cap=1.5)
    want = naive_scores.SCORES[name](**tensors(70), cap=1.5, keep=30)
    got = np.where(scores[:, :70] == np.float32(FORCED), np.inf, scores[:, :70])
    chex.assert_trees_all_close(got, want, rtol=2e-4, atol=1e-6)
    assert not np.allclose(got, scores_of(name, 70, 30)[3][:, :70])


def test_random_scores_depend_on_seed_length_layer_head_and_slot_alone():
    scores = scores_of("random", 70, 30)[3]
    wider = SCORES["random"]().score(layer_of(70, 300), {}, jnp.int32(30))
    chex.assert_trees_all_equal(scores, wider[:, : scores.shape[1]])
    assert len(np.unique(scores)) == scores.size
    assert not np.array_equal(scores[:, :70], scores_of("random", 71, 30)[3][:, :70])


def chosen(name: str, n: int, keep: int, spans=((0, 0),)) -> list[list[int]]:
    method, layer, seen, _ = scores_of(name, n, keep)
    positions = jnp.broadcast_to(layer.slots, layer.k.shape[:2])
    bounds = jnp.asarray(spans, jnp.int32)
    slots, at, counts, _ = _choose_in_layer(method, layer, seen, positions, bounds, jnp.int32(keep))
    for row, where, count in zip(slots, at, counts, strict=True):
        assert (row[count:] == layer.k.shape[1]).all()
        chex.assert_trees_all_equal(row[:count], where[:count])
    return [row[:count].tolist() for row, count in zip(slots, counts, strict=True)]


@pytest.mark.parametrize("keep", [1, 30, 69, 70])
@pytest.mark.parametrize("name", sorted(naive_scores.SCORES))
def test_the_best_stay_and_of_equals_the_last(name, keep):
    scores = naive_scores.SCORES[name](**tensors(70), cap=None, keep=keep, turned=turned)
    assert chosen(name, 70, keep) == naive_scores.best(scores, keep)


@pytest.mark.parametrize("keep", [1, 8, 30, 69])
@pytest.mark.parametrize("name", ["knorm", "keydiff", "h2o"])
def test_heads_that_share_a_budget_keep_the_best_of_all(name, keep):
    scores = naive_scores.SCORES[name](**tensors(70), cap=None, keep=keep, turned=turned)
    stay = chosen(f"adakv_{name}", 70, keep)
    assert stay == naive_scores.best_of_layer(scores, keep)
    assert sum(map(len, stay)) == K * keep
    assert min(map(len, stay)) >= int(keep * 0.2)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in WINDOWS])
def test_protected_tokens_stay_before_all_others(name):
    for stay in chosen(name, 70, 9, spans=((11, 14), (40, 45), (0, 0))):
        assert {11, 12, 13, 40, 41, 42, 43, 44} <= set(stay)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in WINDOWS])
def test_they_stay_in_the_layer_with_the_smallest_budget(name):
    n, keep, spans = 70, 68, ((3, 20), (40, 70), (10, 40), (30, 30))
    protected = {token for start, end in spans for token in range(start, end)}
    assert num_protected(spans) == len(protected) == 67
    budgets = method_of(name).budgets(3, n, keep, len(protected))
    assert sum(budgets) == 3 * keep
    for stay in chosen(name, n, min(budgets), spans):
        assert protected <= set(stay)


def test_ranks_put_the_last_of_equals_first():
    assert ranks(jnp.array([[1.0, 3.0, 3.0, -jnp.inf, 1.0]])).tolist() == [[3, 1, 0, 4, 2]]


@pytest.mark.parametrize("part", [0, 0.3, 0.9, 1])  # of the budget is protected
@pytest.mark.parametrize("num_layers", [1, 2, 30])
@pytest.mark.parametrize("n, keep", [(1000, 500), (1000, 900), (300, 65), (300, 20), (100, 100)])
def test_a_pyramid_of_budgets_keeps_the_average_exactly(num_layers, n, keep, part):
    protected = int(part * keep)
    budgets = PyramidKV().budgets(num_layers, n, keep, protected)
    assert sum(budgets) == num_layers * keep
    assert budgets == sorted(budgets, reverse=True)
    assert min(budgets) >= min(64 + protected, keep) and max(budgets) <= n
    if (num_layers, n, keep, part) == (30, 1000, 500, 0):  # 436 beside the window, the last a 20th
        assert abs(budgets[0] - (64 + 1.95 * 436)) < 1 and abs(budgets[-1] - (64 + 436 / 20)) < 1


@pytest.mark.parametrize(
    "text, kept",
    [
        ("0.5", 50),
        ("50%", 50),
        ("12.5 %", 12),
        ("0.29", 29),
        ("7", 7),
        ("1", 1),
        ("1.0", 100),
        ("100%", 100),
        ("999", 100),
        ("0.001", 1),
    ],
)
def test_a_budget_is_a_part_or_a_number(text, kept):
    assert Budget.parse(text.replace(" ", "")).keep(100) == kept


@pytest.mark.parametrize(
    "text", ["", "0", "0.0", "1.1", "101%", "-3", "half", "1e3", "nan", 0.5, None]
)
def test_a_budget_that_is_neither_is_refused(text):
    with pytest.raises(ValueError, match="budget"):
        Budget.parse(text)


@pytest.mark.parametrize("kept", [0.5, "50%", None, True, 0, -3, Fraction(0), Fraction(3, 2)])
def test_so_is_one_that_is_made_of_neither(kept):
    with pytest.raises(ValueError, match="budget"):
        Budget(kept)


@pytest.mark.parametrize(
    "kept, of_100", [(1, 1), (256, 100), (Fraction(1, 3), 33), (Fraction(1), 100)]
)
def test_a_budget_is_made_of_a_number_or_a_fraction(kept, of_100):
    assert Budget(kept).keep(100) == of_100


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(budget="50%"), "budget must be Budget, got '50%'"),
        (dict(budget=0.5), "budget must be Budget, got 0.5"),
        (dict(budget=None), "budget must be Budget"),
        (dict(method="streaming_llm", budget=64), "budget must be Budget, got 64"),
        (dict(method=None), "no method None"),
        (dict(interval=1.5), "interval must be int, got 1.5"),
        (dict(interval=True), "interval must be int, got True"),
        (dict(interval="3"), "interval must be int, got '3'"),
        (dict(interval=-1), "interval must be at least 1, got -1"),
    ],
)
def test_a_choice_of_other_types_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        Compression(**dict(method="knorm", budget=Budget(9)) | fields)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(method="snapkw", budget="0.5"), "no method 'snapkw'; there are sliding_window, stre"),
        (dict(method="knorm", budget="0.5", interval=0), "interval must be at least 1"),
        (dict(method="streaming_llm", budget="0.5"), "takes a number of tokens, not a part"),
        (dict(method="streaming_llm", budget="4"), "leaves no window"),
        (dict(method="sliding_window", budget="64", interval=2), "takes no interval"),
        (dict(method="adakv_tova", budget="0.5"), "no method 'adakv_tova'"),
    ],
)
def test_a_choice_that_means_nothing_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Compression(**fields | {"budget": Budget.parse(fields["budget"])})


def test_the_package_offers_every_method_by_the_name_it_has():
    assert set(METHODS) >= {"sliding_window", "streaming_llm", *naive_scores.SCORES, "random"}
    for name in METHODS:
        if name not in WINDOWS:
            assert method_of(name).name == name

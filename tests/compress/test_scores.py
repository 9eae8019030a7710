"""Scores and choices of every method, compared with float64 references, one token at a time."""

from fractions import Fraction
from functools import partial

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.compress import (
    H2O,
    METHODS,
    AdaKV,
    Budget,
    Compression,
    ExpectedAttention,
    Knorm,
    PyramidKV,
    Random,
    ScoreMethod,
    SnapKV,
    StreamingLLM,
)
from jaxkv.compress.device import choose_in_layer
from jaxkv.compress.kept import num_protected
from jaxkv.compress.method import ranks
from jaxkv.testing import check_score_method
from jaxkv.testing.score_methods import K, layer_of, scores_of, tensors, turned
from tests.compress import naive_scores

SCORES = [name for name, method in METHODS.items() if isinstance(method, ScoreMethod)]


def method_of(name: str) -> ScoreMethod:
    return Compression(method=name, budget=0.5).score_method()


@pytest.mark.parametrize("n", [5, 70, pytest.param(129, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(naive_scores.SCORES))
def test_each_score_is_that_of_a_token_at_a_time_in_float64(name, n):
    check_score_method(method_of(name), naive_scores.SCORES[name], lengths=[n], soft_caps=[None])


@pytest.mark.parametrize(
    "name, method",
    [
        ("snapkv", SnapKV(window=9, kernel_size=1)),
        ("snapkv", SnapKV(window=20, kernel_size=7)),
        ("snapkv", PyramidKV(window=20, kernel_size=3, beta=2)),
        ("h2o", H2O(recent_part=0.3)),
        ("expected_attention", ExpectedAttention(sink_tokens=2, future_positions=9)),
    ],
)
def test_parameters_are_those_of_the_papers(name, method):
    fields = {field: value for field, value in vars(method).items() if field != "beta"}
    naive = partial(naive_scores.SCORES[name], **fields)
    check_score_method(method, naive, lengths=[70], soft_caps=[None])


@pytest.mark.parametrize("safeguard", [0.0, 0.3, 1.0])
def test_each_head_keeps_its_safeguard(safeguard):
    stay = chosen(AdaKV(Knorm(), safeguard=safeguard), 70, 9)
    assert stay == naive_scores.best_of_layer(naive_scores.knorm(tensors(70)["k"]), 9, safeguard)


def test_a_steeper_pyramid_gives_the_last_layer_less():
    flat, steep = (PyramidKV(beta=beta).budgets(3, 1000, 500) for beta in (1, 50))
    assert flat == [500] * 3 and steep[-1] == 64 + 436 // 50


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: SnapKV(window=0), "window must be an int of at least 1, got 0"),
        (lambda: SnapKV(kernel_size=4), "kernel_size must be odd, got 4"),
        (lambda: PyramidKV(beta=1.5), "beta must be an int"),
        (lambda: H2O(recent_part=1.5), "recent_part must be a number from 0 to 1, got 1.5"),
        (lambda: ExpectedAttention(future_positions=True), "future_positions must be an int"),
        (lambda: AdaKV("knorm"), "method must be a ScoreMethod, got 'knorm'"),
        (lambda: AdaKV(Knorm(), safeguard=-1), "safeguard must be a number from 0 to 1, got -1"),
        (lambda: StreamingLLM(sink_tokens=-1), "sink_tokens must be an int of at least 0"),
        (lambda: Random(seed="1"), "seed must be an int of at least 0, got '1'"),
    ],
)
def test_a_parameter_that_cannot_be_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", ["tova", "snapkv", "h2o"])
def test_weights_follow_a_soft_cap(name):
    method = method_of(name)
    check_score_method(method, naive_scores.SCORES[name], lengths=[70], soft_caps=[1.5])
    capped, plain = (scores_of(method, 70, 30, cap)[1][:, :70] for cap in (1.5, None))
    assert not np.allclose(capped, plain)


def test_random_scores_depend_on_seed_length_layer_head_and_slot_alone():
    scores = scores_of(Random(), 70, 30)[1]
    wider = Random().score(layer_of(70, 300), None, jnp.int32(30))
    chex.assert_trees_all_equal(scores, wider[:, : scores.shape[1]])
    assert len(np.unique(scores)) == scores.size
    assert not np.array_equal(scores[:, :70], scores_of(Random(), 71, 30)[1][:, :70])


def chosen(name: str | ScoreMethod, n: int, keep: int, spans=((0, 0),)) -> list[list[int]]:
    method, layer = method_of(name) if isinstance(name, str) else name, layer_of(n)
    statistics, _ = scores_of(method, n, keep)
    positions = jnp.broadcast_to(layer.slots, layer.k.shape[:2])
    bounds = jnp.asarray(spans, jnp.int32)
    choice = choose_in_layer(method, layer, statistics, positions, bounds, jnp.int32(keep))
    slots, at, counts, _ = choice
    for row, where, count in zip(slots, at, counts, strict=True):
        assert (row[count:] == layer.k.shape[1]).all()
        chex.assert_trees_all_equal(row[:count], where[:count])
    return [row[:count].tolist() for row, count in zip(slots, counts, strict=True)]


@pytest.mark.parametrize("keep", [1, 30, 69, 70])
@pytest.mark.parametrize("name", sorted(naive_scores.SCORES))
def test_the_best_are_kept_and_of_equal_ones_the_last(name, keep):
    scores = naive_scores.SCORES[name](**tensors(70), cap=None, keep=keep, turned=turned)
    assert chosen(name, 70, keep) == naive_scores.best(scores, keep)


@pytest.mark.parametrize("keep", [1, 8, 30, 69])
@pytest.mark.parametrize("name", ["knorm", "keydiff", "h2o"])
def test_heads_that_share_a_budget_keep_the_best_of_all_heads(name, keep):
    scores = naive_scores.SCORES[name](**tensors(70), cap=None, keep=keep, turned=turned)
    stay = chosen(f"adakv_{name}", 70, keep)
    assert stay == naive_scores.best_of_layer(scores, keep)
    assert sum(map(len, stay)) == K * keep
    assert min(map(len, stay)) >= int(keep * 0.2)


@pytest.mark.parametrize("name", SCORES)
def test_protected_tokens_are_kept_before_all_others(name):
    for stay in chosen(name, 70, 9, spans=((11, 14), (40, 45), (0, 0))):
        assert {11, 12, 13, 40, 41, 42, 43, 44} <= set(stay)


@pytest.mark.parametrize("name", SCORES)
def test_protected_tokens_are_kept_in_the_layer_with_the_smallest_budget(name):
    n, keep, spans = 70, 68, ((3, 20), (40, 70), (10, 40), (30, 30))
    protected = {token for start, end in spans for token in range(start, end)}
    assert num_protected(spans) == len(protected) == 67
    budgets = method_of(name).budgets(3, n, keep, len(protected))
    assert sum(budgets) == 3 * keep
    for stay in chosen(name, n, min(budgets), spans):
        assert protected <= set(stay)


def test_ranks_put_the_last_of_equal_scores_first():
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
    if (num_layers, n, keep, part) == (
        30,
        1000,
        500,
        0,
    ):  # 436 besides the window, the last layer a 20th
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
    assert Budget(text.replace(" ", "")).keep(100) == kept


@pytest.mark.parametrize(
    "kept",
    [
        *("", "0", "0.0", "1.1", "101%", "-3", "half", "1e3", "nan", None, True, 0, -3, b"3"),
        *(0.0, 1.5, 256.0, float("nan"), Fraction(0), Fraction(3, 2)),
    ],
)
def test_a_budget_that_is_neither_is_refused(kept):
    with pytest.raises(ValueError, match="budget"):
        Budget(kept)


@pytest.mark.parametrize(
    "kept, of_100",
    [(1, 1), (256, 100), (Fraction(1, 3), 33), (Fraction(1), 100), (0.29, 29), (1.0, 100)],
)
def test_a_budget_is_made_of_a_number_a_fraction_or_a_float(kept, of_100):
    assert Budget(kept).keep(100) == of_100


def test_one_token_is_another_budget_than_all_tokens():
    assert Budget(1) == Budget("1") != Budget(1.0) == Budget("100%")
    assert (str(Budget(1)), str(Budget(1.0)), str(Budget("50%"))) == ("1", "1.0", "0.5")


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(budget=None), "budget None: must be a part, as 0.5 or 50%, or a number of tokens"),
        (dict(budget=64.0), "budget 64.0: must be a part"),
        (dict(method=None), "method must be a name, a window or a score method, got None"),
        (dict(method=PyramidKV), "method must be a name, a window or a score method, got <class"),
        (dict(interval=1.5), "interval must be an int of at least 1, got 1.5"),
        (dict(interval=True), "interval must be an int of at least 1, got True"),
        (dict(interval="3"), "interval must be an int of at least 1, got '3'"),
        (dict(interval=-1), "interval must be an int of at least 1, got -1"),
    ],
)
def test_a_choice_of_other_types_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        Compression(**dict(method="knorm", budget=Budget(9)) | fields)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(method="snapkw", budget="0.5"), "no method 'snapkw'; there are sliding_window, stre"),
        (dict(method="knorm", budget="0.5", interval=0), "interval must be an int of at least 1"),
        (dict(method="streaming_llm", budget="0.5"), "takes a number of tokens, not a part"),
        (dict(method="streaming_llm", budget="4"), "leaves no window"),
        (dict(method="sliding_window", budget="64", interval=2), "takes no interval"),
        (dict(method="adakv_tova", budget="0.5"), "no method 'adakv_tova'"),
    ],
)
def test_a_choice_that_means_nothing_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Compression(**fields)


def test_the_package_offers_every_method_by_the_name_it_has():
    assert set(METHODS) >= {"sliding_window", "streaming_llm", *naive_scores.SCORES, "random"}
    for name, method in METHODS.items():
        assert Compression(method=name, budget=9) == Compression(method=method, budget=9)
        assert Compression(method=name, budget=9).method_name == name
    with pytest.raises(TypeError):
        METHODS["mine"] = Random()  # pyright: ignore

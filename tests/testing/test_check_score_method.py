"""`check_score_method` catches scores that are wrong, or that depend on how queries are cut."""

from dataclasses import dataclass

import numpy as np
import pytest

from jaxkv.compress import Knorm, PerSlot, ScoreMethod
from jaxkv.testing import check_score_method
from tests.compress import naive_scores


@dataclass(frozen=True)
class LastQuery(ScoreMethod[PerSlot]):
    """The weights of the last query, averaged over the heads of a group."""

    num_queries: int = 1
    scale: float = 1.0

    def observe(self, queries, tokens):
        return PerSlot(self.scale * queries.attention(tokens).sum(axis=2).mean(axis=1))

    def score(self, tokens, statistics, keep):
        return statistics.values


def naive(q, k, cap, **_):
    return naive_scores.weights_of(q, k, cap)[-1].reshape(2, 2, -1).mean(axis=1)


def test_a_method_of_ones_own_passes():
    check_score_method(LastQuery(), naive)
    check_score_method(Knorm(), lambda k, **_: -np.linalg.norm(k, axis=-1))


@pytest.mark.parametrize("method", [LastQuery(scale=1.01), LastQuery(num_queries=2)])
def test_other_scores_are_caught(method):
    with pytest.raises(AssertionError, match="5 tokens, soft cap None, chunks of 64"):
        check_score_method(method, naive)


class MeanOverChunks(LastQuery):
    """Divides by the rows of a chunk, padding included."""

    def observe(self, queries, tokens):
        return PerSlot(queries.attention(tokens).mean(axis=(1, 2)))


def test_a_score_that_depends_on_the_size_of_chunks_is_caught():
    def mean(q, k, cap, **_):
        return naive_scores.weights_of(q, k, cap)[-1].reshape(2, 2, -1).mean(axis=1) / 64

    with pytest.raises(AssertionError, match="chunks of 7"):
        check_score_method(MeanOverChunks(), mean)

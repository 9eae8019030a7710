"""Synthetic tasks: samples say what they ask for, fit their length, and depend on their seed."""

import pytest

from jaxkv.eval.ruler import TASKS, make_sample


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_has_its_answers_fits_its_length_and_depends_on_its_seed(task):
    for length in (120, 400):
        sample = make_sample(task, length, 0.5, 7, words)
        assert 0.8 * length < words(sample.context) <= length
        assert all(answer in sample.context for answer in sample.answers)
        assert sample == make_sample(task, length, 0.5, 7, words)
        assert sample.context != make_sample(task, length, 0.5, 8, words).context
        assert not any(answer in sample.question for answer in sample.answers)
    assert sample.answers == make_sample(task, 300, 0.5, 7, words).answers or task == "fwe"


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("task", ["niah_single", "niah_multikey"])
def test_the_needle_is_where_it_was_asked_for(task, depth):
    sample = make_sample(task, 500, depth, 1, words)
    before = sample.context.partition(sample.answers[0])[0]
    assert abs(words(before) / words(sample.context) - depth) < 0.1


def test_names_are_set_after_those_that_they_are_set_to():
    for seed in range(20):
        sample = make_sample("vt", 200, 0.2, seed, words)
        places = [sample.context.index(f"Set {name} to") for name in sample.answers]
        assert places == sorted(places)


@pytest.mark.parametrize("task", ["cwe", "fwe"])
def test_the_words_asked_for_are_the_most_frequent(task):
    for seed in range(10):
        sample = make_sample(task, 300, 0.0, seed, words)
        drawn = sample.context.splitlines()[1].split()
        least = min(drawn.count(word) for word in sample.answers)
        assert all(drawn.count(w) <= least for w in set(drawn) - set(sample.answers))


def test_a_score_is_the_share_of_answers_found():
    sample = make_sample("niah_multivalue", 200, 0.5, 0, words)
    one, two, three = sample.answers
    assert sample.score(f"they are {one}, {two} and {three}.") == 1
    assert sample.score(f"{two}!") == 1 / 3
    assert make_sample("vt", 200, 0.5, 0, words).score("nothing") == 0


@pytest.mark.parametrize(
    "task, length, depth, message",
    [
        ("qa", 100, 0.5, "no task 'qa'; there are niah_single"),
        ("niah_single", 10, 0.5, "niah_single does not fit into 10 tokens"),
        ("vt", 100, 1.5, "depth must be 0 to 1"),
    ],
)
def test_a_sample_that_cannot_be_is_refused(task, length, depth, message):
    with pytest.raises(ValueError, match=message):
        make_sample(task, length, depth, 0, words)

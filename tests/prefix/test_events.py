"""The stream of events: it rebuilds the index, parents first, and is refused where it has a gap."""

import pytest

from jaxkv.prefix.events import PageChanged, PageEvicted, PageStored, replay
from tests.prefix.test_index import numbers
from tests.prefix.world import PUBLIC, SECRET, World


def busy(windows=(None,)) -> World:
    """A world whose pool has turned over a few times."""
    world = World(4, windows, capacity=12)
    for i in range(12):
        world.run(numbers(3 + i) + numbers(14, 100 * i), PUBLIC if i % 3 else SECRET)
        world.run(numbers(3 + i))
        world.index.evict(len(windows) - 1, 2)
        assert replay(world.events) == world.index.stored()
    return world


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 5)], ids=str)
def test_a_stream_rebuilds_the_index(windows):
    world = busy(windows)
    assert world.index.stored()
    kinds = {type(event) for event in world.events}
    assert kinds == {PageStored, PageEvicted} | ({PageChanged} if any(windows) else set())


@pytest.mark.parametrize("windows", [(None,), (None, 5)], ids=str)
def test_parents_are_stored_before_their_children_and_removed_after_them(windows):
    alive: dict[int, int] = {}
    numbers_seen = set()
    for event in busy(windows).events:
        if isinstance(event, PageStored):
            assert event.page not in numbers_seen
            assert event.parent == 0 or event.parent in alive
            numbers_seen.add(event.page)
            alive[event.page] = event.parent
        elif isinstance(event, PageEvicted):
            del alive[event.page]
            assert event.page not in alive.values()


def test_an_event_tells_the_tokens_and_the_namespace_of_a_page():
    world = World(4)
    world.run(numbers(6), SECRET)
    first, second = world.events
    assert isinstance(first, PageStored) and isinstance(second, PageStored)
    assert (first.tokens, second.tokens) == ((0, 1, 2, 3), (4, 5))
    assert (first.parent, second.parent) == (0, first.page)
    assert first.namespace == second.namespace == SECRET


@pytest.mark.parametrize(
    "event", [PageEvicted(3), PageChanged(3, (1,)), PageStored(4, 3, PUBLIC, (1,), (1,))]
)
def test_a_stream_that_begins_too_late_is_refused(event):
    with pytest.raises(ValueError, match="page 3 is not stored"):
        replay([event])

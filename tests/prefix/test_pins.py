"""Pins: pages that stay, within a limit and for a time."""

import pytest

from jaxkv.prefix import OutOfPages, Pins, pack
from tests.prefix.test_index import numbers
from tests.prefix.world import PUBLIC, World


def fill(world: World) -> None:
    """Other sequences push everything out that can go."""
    for i in range(8):
        world.run(numbers(9, 1000 * (i + 1)))


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 5)], ids=str)
@pytest.mark.parametrize("length", [16, 18])
def test_a_pinned_prefix_outlives_what_came_later(windows, length):
    world = World(4, windows, capacity=12)
    world.run(numbers(length))
    pin = world.pins.pin(pack(numbers(length)), PUBLIC, ttl_seconds=60)
    assert pin.num_tokens == length
    fill(world)
    assert world.index.probe(pack(numbers(length)), PUBLIC) == length
    world.pins.unpin(pin)
    fill(world)
    assert world.index.probe(pack(numbers(length)), PUBLIC) == 0
    world.end()


def test_unpinning_twice_gives_pages_back_once():
    world = World(4)
    world.run(numbers(8))
    pins = [world.pins.pin(pack(numbers(8)), PUBLIC, ttl_seconds=60) for _ in range(2)]
    assert world.pins.num_pinned(0) == 2  # a page under two pins is one page
    world.pins.unpin(pins[0])
    world.pins.unpin(pins[0])
    assert world.pins.num_pinned(0) == world.pools[0].num_held == 2
    world.check()
    world.pins.unpin(pins[1])
    assert world.pins.num_pinned(0) == world.pools[0].num_held == 0
    world.check()


def test_pins_beyond_the_limit_are_refused_and_hold_no_pages():
    world = World(4, capacity=12)
    world.run(numbers(16))
    world.run(numbers(16, 100))
    pins = Pins(world.index, max_share=0.5)
    assert pins.max_pages == (6,)
    pins.pin(pack(numbers(16)), PUBLIC, ttl_seconds=60)
    with pytest.raises(ValueError, match="needs 4 pages of group 0; 4 are pinned, and 6 may be"):
        pins.pin(pack(numbers(16, 100)), PUBLIC, ttl_seconds=60)
    assert world.pools[0].num_held == pins.num_pinned(0) == 4
    pins.pin(pack(numbers(8, 100)), PUBLIC, ttl_seconds=60)
    assert pins.num_pinned(0) == 6
    pins.pin(pack(numbers(16)), PUBLIC, ttl_seconds=60)  # nothing new


def test_a_pin_ends_by_the_clock_at_the_next_pin():
    world = World(4, capacity=12)
    world.run(numbers(16))
    world.pins.pin(pack(numbers(16)), PUBLIC, ttl_seconds=5)
    world.now += 4
    world.pins.expire()
    assert world.pins.num_pinned(0) == 4
    world.now += 2
    world.run(numbers(16, 100))
    world.pins.pin(pack(numbers(16, 100)), PUBLIC, ttl_seconds=5)  # six may be
    assert world.pins.num_pinned(0) == 4
    world.check()


@pytest.mark.parametrize("tokens", [(1, 2), "abc", b"abc"])
def test_tokens_that_are_not_packed_are_no_pin(tokens):
    world = World(4)
    with pytest.raises(TypeError, match="must be packed"):
        world.pins.pin(tokens, PUBLIC, ttl_seconds=1)


def test_growth_releases_only_expired_pins():
    world = World(4, capacity=8)
    world.run(numbers(8))
    world.run(numbers(8, 100))
    world.pins.pin(pack(numbers(8)), PUBLIC, ttl_seconds=5)
    world.pins.pin(pack(numbers(8, 100)), PUBLIC, ttl_seconds=50)
    row = world.tables.open()
    with pytest.raises(OutOfPages):
        world.tables.grow(row, 6 * 4)
    world.now += 10
    world.tables.grow(row, 6 * 4)
    with pytest.raises(OutOfPages):
        world.tables.grow(row, 7 * 4)
    assert world.index.probe(pack(numbers(8, 100)), PUBLIC) == 8
    world.tables.close(row)
    assert len(world.pins.holdings()) == 1


def test_a_pin_is_no_prompt_in_the_counters():
    world = World(4)
    world.run(numbers(8))
    before = vars(world.index.counters).copy()
    pin = world.pins.pin(pack(numbers(30)), PUBLIC, ttl_seconds=60)
    assert pin.num_tokens == 8
    assert vars(world.index.counters) == before


def test_a_reset_waits_for_pins():
    world = World(4)
    world.run(numbers(8))
    pin = world.pins.pin(pack(numbers(8)), PUBLIC, ttl_seconds=60)
    with pytest.raises(ValueError, match="2 pages are in use; end all requests and pins"):
        world.index.reset()
    world.pins.unpin(pin)
    world.index.reset()


@pytest.mark.parametrize("ttl", [0, -1, float("nan")])
def test_a_time_that_is_none_is_refused(ttl):
    with pytest.raises(ValueError, match="ttl_seconds"):
        World().pins.pin(b"", PUBLIC, ttl_seconds=ttl)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match="a share is from 0 to 1"):
        Pins(World().index, max_share=share)

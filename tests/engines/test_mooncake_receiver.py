"""Which engine a Mooncake mover grants with, and what a fence ends, on engines that only count."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdhandoff.engines.base import Extent, Memory
from pdhandoff.engines.mooncake.engine import Engine
from pdhandoff.engines.mooncake.ranges import Ranges
from pdhandoff.engines.mooncake.receiver import MAX_ENGINES, Receiver
from pdhandoff.errors import ErrorCode, MoverError
from support.movers import soon

MEMORY = Memory(0, 1000)

_EXTENTS = st.lists(st.builds(Extent, st.integers(0, 30), st.integers(1, 10)), max_size=4)


@given(st.lists(st.tuples(st.booleans(), _EXTENTS), max_size=8), _EXTENTS)
def test_ranges_are_a_set_of_addresses(steps: list[tuple[bool, list[Extent]]], asked: list[Extent]) -> None:
    def addresses(extents: list[Extent]) -> set[int]:
        return {address for start, length in extents for address in range(start, start + length)}

    ranges, expected = Ranges(), set[int]()
    for adds, extents in steps:
        if adds:
            ranges.add(extents)
            expected |= addresses(extents)
        else:
            ranges.remove(extents)
            expected -= addresses(extents)
    assert bool(ranges) == bool(expected)
    assert ranges.touch(asked) == bool(expected & addresses(asked))


class Counted:
    """An engine that is only named."""

    def __init__(self, name: str) -> None:
        self.segment = name
        self.registered: set[int] = set()
        self.closed = False

    def register(self, memory: Memory) -> None:
        self.registered.add(memory.address)

    def unregister(self, address: int) -> None:
        self.registered.remove(address)

    def close(self) -> None:
        self.closed = True


class Counting:
    """A receiver, and the engines that it has started."""

    def __init__(self) -> None:
        self.engines: list[Counted] = []
        self.receiver = Receiver(self._start)

    def _start(self) -> Engine:
        self.engines.append(Counted(str(len(self.engines))))
        return cast("Engine", self.engines[-1])

    def grant(self, start: int, length: int = 10) -> str:
        return self.receiver.grant([Extent(start, length)], [MEMORY])

    @property
    def alive(self) -> list[str]:
        return [engine.segment for engine in self.engines if not engine.closed]


@pytest.fixture
def counting() -> Counting:
    return Counting()


def test_grants_share_an_engine_until_somebody_new_is_met(counting: Counting) -> None:
    assert [counting.grant(0), counting.grant(10)] == ["0", "0"]
    counting.receiver.renew()
    assert [counting.grant(20), counting.grant(30)] == ["1", "1"]
    assert counting.alive == ["0", "1"]


def test_an_engine_that_has_granted_nothing_is_not_replaced(counting: Counting) -> None:
    counting.receiver.register(MEMORY)
    counting.receiver.renew()
    assert counting.grant(0) == "0"


def test_a_fence_ends_the_engine_of_its_extents_and_no_other(counting: Counting) -> None:
    counting.grant(0)
    counting.receiver.renew()
    counting.grant(10)
    counting.receiver.fence([Extent(5, 1)], soon())
    assert counting.alive == ["1"]
    assert counting.grant(0) == "1"


def test_what_one_fence_has_ended_another_need_not(counting: Counting) -> None:
    counting.grant(0)
    counting.grant(10)
    counting.receiver.fence([Extent(0, 10)], soon())
    assert counting.grant(20) == "1"
    counting.receiver.fence([Extent(10, 10)], soon())
    assert counting.alive == ["1"]


def test_a_fence_of_what_is_granted_again_ends_the_new_engine(counting: Counting) -> None:
    counting.grant(0)
    counting.receiver.fence([Extent(0, 10)], soon())
    counting.grant(0)
    counting.receiver.fence([Extent(0, 10)], soon())
    assert counting.alive == []


def test_an_engine_goes_when_all_that_it_granted_is_granted_with_another(counting: Counting) -> None:
    counting.grant(0, 30)
    counting.receiver.renew()
    counting.grant(0, 20)
    assert counting.alive == ["0", "1"]
    counting.grant(20, 10)
    assert counting.alive == ["1"]


def test_there_are_never_more_engines_than_allowed(counting: Counting) -> None:
    for step in range(3 * MAX_ENGINES):
        counting.receiver.renew()
        counting.grant(10 * step)
    assert len(counting.alive) == MAX_ENGINES
    counting.receiver.fence([Extent(0, 1)], soon())
    counting.receiver.renew()
    assert counting.grant(500) == str(MAX_ENGINES)


def test_memory_is_hidden_on_every_engine(counting: Counting) -> None:
    counting.grant(0)
    counting.receiver.renew()
    counting.grant(10)
    assert all(engine.registered == {0} for engine in counting.engines)
    counting.receiver.hide(MEMORY)
    assert not any(engine.registered for engine in counting.engines)


def test_nothing_is_granted_after_close(counting: Counting) -> None:
    counting.grant(0)
    counting.receiver.close(1.0)
    counting.receiver.close(1.0)
    assert counting.alive == []
    with pytest.raises(MoverError) as caught:
        counting.grant(0)
    assert caught.value.code is ErrorCode.MISUSE

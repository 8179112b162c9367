"""What `Checked` refuses and `Metered` counts, and the registry."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from collections.abc import Iterator

import pytest

from pdhandoff.engines import registry
from pdhandoff.engines.base import Extent, Mover, Peer, Transfer, TransferState, Writes
from pdhandoff.engines.checked import Checked
from pdhandoff.engines.faults import Fault, Faulty, Rule
from pdhandoff.engines.forwarding import Forwarding
from pdhandoff.engines.loopback import LoopbackMover, create
from pdhandoff.engines.metered import Metered
from pdhandoff.errors import ErrorCode, LocalError, MoverError
from support.movers import PAGE, MakeSide, Side, settle

DONE, FAILED = TransferState.DONE, TransferState.FAILED


class Careless(Forwarding):
    """A mover that writes wherever it is told, and keeps a list of it."""

    def __init__(self, mover: Mover) -> None:
        super().__init__(mover)
        self.seen: list[Writes] = []

    def submit(self, peer: Peer, writes: Writes) -> Transfer:
        self.seen.append(writes)
        return self._mover.submit(peer, Writes.of())


@pytest.fixture
def careless() -> Iterator[tuple[Careless, Checked, Side]]:
    inner = Careless(create())
    checked = Checked(inner)
    yield inner, checked, Side(checked)
    checked.close()


def test_checked_lets_a_careless_mover_see_only_what_was_allowed(
    careless: tuple[Careless, Checked, Side], loopback: MakeSide
) -> None:
    inner, checked, writer = careless
    owner = loopback()
    peer = checked.connect(owner.mover.describe([owner.extent(0, 8)]))
    good = Writes.of((writer.address, owner.address + PAGE, 8))
    with pytest.raises(MoverError) as caught:
        checked.submit(peer, good)  # nothing was allowed yet
    assert caught.value.code is ErrorCode.OUT_OF_RANGE
    checked.allow(peer, [owner.extent(1)])
    checked.submit(peer, good)
    for bad in ((writer.address, owner.address + 2 * PAGE, 1), (writer.address - 1, owner.address + PAGE, 1)):
        with pytest.raises(MoverError):
            checked.submit(peer, Writes.of((writer.address, owner.address + PAGE, 8), bad))
    checked.allow(peer, [])
    with pytest.raises(MoverError):
        checked.submit(peer, good)
    assert inner.seen == [good]
    counts = checked.statistics()
    assert (counts.passed, counts.refused_destinations, counts.refused_sources) == (1, 3, 1)


def test_checked_counts_extents_that_are_not_ours(careless: tuple[Careless, Checked, Side]) -> None:
    _, checked, side = careless
    me = checked.connect(checked.describe([]))
    for extent in (Extent(side.address + 1, PAGE), Extent(1 << 40, PAGE), side.extent(7, 2)):
        with pytest.raises(MoverError):
            checked.describe([extent])
        with pytest.raises(MoverError):
            checked.fence(me, [extent], 0.0)
    assert checked.statistics().refused_extents == 6
    checked.deregister(side.region)
    with pytest.raises(MoverError):
        checked.describe([side.extent(0)])


def test_checked_does_not_count_what_the_wrapped_mover_refused(loopback: MakeSide) -> None:
    owner = loopback()
    checked = Checked(Faulty(create(), [Rule(fault=Fault.REFUSE)]))
    writer = Side(checked)
    peer = writer.connect(owner, owner.extent(0))
    with pytest.raises(MoverError):
        checked.submit(peer, Writes.of((writer.address, owner.address, 1)))
    assert checked.statistics().passed == 0
    checked.close()


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def metered(loopback: MakeSide) -> Iterator[tuple[Clock, Metered, Faulty, Side, Side]]:
    clock = Clock()
    rules = [
        Rule(fault=Fault.HOLD, min_bytes=100, max_bytes=199, times=None),
        Rule(fault=Fault.FAIL, min_bytes=200, max_bytes=299, times=None),
    ]
    faulty = Faulty(create(), rules)
    mover = Metered(faulty, clock=clock)
    yield clock, mover, faulty, Side(mover), loopback()
    mover.close()


def test_metered_counts_bytes_transfers_failures_and_time(
    metered: tuple[Clock, Metered, Faulty, Side, Side],
) -> None:
    clock, mover, faulty, writer, owner = metered
    peer = writer.connect(owner, owner.extent(0))
    held, failing = (mover.submit(peer, Writes.of((writer.address, owner.address, nbytes))) for nbytes in (100, 200))
    clock.now += 2.0
    assert mover.poll(failing).state is FAILED
    clock.now += 1.5
    assert mover.statistics().in_flight == 1
    faulty.release_hold()
    for _ in range(3):  # counted once
        assert mover.poll(held).state is DONE
        clock.now += 1.0
    done = mover.submit(peer, Writes.of((writer.address, owner.address, 3), (0, 0, 0)))
    assert mover.poll(done).state is DONE
    with pytest.raises(MoverError):
        mover.submit(peer, Writes.of((0, owner.address, 1)))
    counts = mover.statistics()
    assert (counts.submitted, counts.refused, counts.done, counts.failed, counts.in_flight) == (3, 1, 2, 1, 0)
    assert (counts.writes, counts.bytes_submitted, counts.bytes_done) == (4, 303, 103)
    assert (counts.in_flight_s, counts.longest_s) == (5.5, 3.5)


def test_metered_says_what_was_released_before_its_end_was_seen(
    metered: tuple[Clock, Metered, Faulty, Side, Side],
) -> None:
    _, mover, _, writer, owner = metered
    peer = writer.connect(owner, owner.extent(0))
    unseen = mover.submit(peer, Writes.of((writer.address, owner.address, 1)))
    seen = mover.submit(peer, Writes.of((writer.address, owner.address, 1)))
    settle(mover, seen)
    for transfer in (unseen, seen, unseen):
        mover.release(transfer)
    counts = mover.statistics()
    assert (counts.released_unseen, counts.done, counts.in_flight) == (1, 1, 0)


# the registry


class _Entries:
    """Stands in for what is installed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **declared: str) -> None:
        entries = [importlib.metadata.EntryPoint(name, value, registry.GROUP) for name, value in declared.items()]
        monkeypatch.setattr(
            importlib.metadata, "entry_points", lambda *, group: entries if group == registry.GROUP else []
        )


def test_loopback_is_known_without_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    _Entries(monkeypatch)
    assert "loopback" in registry.known()
    assert "mine" not in registry.known()
    mover = registry.create("loopback")
    assert isinstance(mover, LoopbackMover)
    assert mover.name == "loopback"
    mover.close()


def test_a_package_adds_a_mover_but_cannot_replace_a_built_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("somebodys_mover")
    module.make = lambda *, inner: Metered(inner())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somebodys_mover", module)
    _Entries(monkeypatch, mine="somebodys_mover:make", loopback="somebodys_mover:make")
    assert {"loopback", "mine"} <= set(registry.known())
    mover = registry.create("mine", inner=create)
    assert isinstance(mover, Metered)
    mover.close()
    built_in = registry.create("loopback")
    assert isinstance(built_in, LoopbackMover)
    built_in.close()


def test_an_unknown_mover_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    _Entries(monkeypatch, fast="nowhere:create")
    with pytest.raises(LocalError, match=r"no mover 'slow': known are fast, loopback, ") as caught:
        registry.create("slow")
    assert caught.value.code is ErrorCode.CONFIG


@pytest.mark.parametrize("value", ["pdhandoff_no_such_module:create", "pdhandoff.engines.base:no_such_name"])
def test_a_mover_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    _Entries(monkeypatch, broken=value)
    with pytest.raises(LocalError, match="no_such") as caught:
        registry.create("broken")
    assert caught.value.code is ErrorCode.CONFIG
    assert caught.value.__cause__ is not None


def test_an_option_that_a_mover_does_not_have_is_refused() -> None:
    with pytest.raises(LocalError, match="colour"):
        registry.create("loopback", colour="blue")


def test_what_is_no_mover_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _Entries(monkeypatch, odd="builtins:dict")
    with pytest.raises(LocalError, match="no mover"):
        registry.create("odd")

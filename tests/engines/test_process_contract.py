"""What the movers promise between real processes. Each test is one rule; the parameter is the mover that keeps it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from pdhandoff.engines.base import TransferState, Writes
from pdhandoff.errors import ErrorCode, MoverError
from support.mover_child import Child
from support.movers import PAGE, MakeSide, settle, sides
from support.transfer_engines import MOVERS, need_mover

pytestmark = pytest.mark.slow

BIG = 16384
"pages of a write that takes a while: 64 MiB"

watches_processes = pytest.mark.parametrize("name", ["loopback", "nixl"], indirect=True)
"for rules of movers that know in which process a peer lives"


@pytest.fixture(scope="module", params=sorted(MOVERS))
def name(request: pytest.FixtureRequest) -> str:
    """The mover under test, whose library is loaded before anything is counted."""
    chosen = str(request.param)
    need_mover(chosen)
    return chosen


@pytest.fixture
def make(name: str) -> Iterator[MakeSide]:
    """Makes sides on this kind of mover, and closes them."""
    yield from sides(MOVERS[name])


@pytest.mark.parametrize("nbytes", [1, PAGE, (1 << 20) + 5, 64 << 20])
def test_bytes_arrive_in_another_process_and_from_it(name: str, make: MakeSide, nbytes: int) -> None:
    pages = BIG + 1
    side = make(pages)
    side.put(random.Random(nbytes).randbytes(nbytes))
    with Child(name, pages) as child:
        peer = side.mover.connect(child.describe((0, pages)))
        assert side.write(peer, (side.address, child.address + 3, nbytes)).state is TransferState.DONE
        edge = min(nbytes, 4096)
        assert child.read(0, edge + 3) == bytes(3) + side.bytes(0, edge)
        assert child.read(3 + nbytes - edge, edge + 8) == side.bytes(nbytes - edge, edge) + bytes(8)
        child.connect(side, side.extent(0, pages))
        side.fill(8)
        assert child.ask("write", destination=side.address + 9, nbytes=nbytes, value=7)["state"] == "done"
        assert side.bytes() == b"\x08" * 9 + b"\7" * nbytes + b"\x08" * (pages * PAGE - 9 - nbytes)


def test_a_child_cannot_write_outside_its_grant(name: str, make: MakeSide) -> None:
    side = make()
    with Child(name) as child:
        child.connect(side, side.extent(1))
        answer = child.ask("write", destination=side.address + 2 * PAGE - 1, nbytes=2, value=1)
        assert answer["error"] == ErrorCode.OUT_OF_RANGE
        assert not any(side.bytes())


@pytest.mark.parametrize("used", [False, True])
def test_T080_a_restarted_peer_is_another_incarnation(name: str, make: MakeSide, used: bool) -> None:
    side = make()
    side.fill(1)
    with Child(name) as first:
        old = side.mover.connect(first.describe((0, 4)))
        if used:
            assert side.write(old, (side.address, first.address, PAGE)).state is TransferState.DONE
    with Child(name) as second:
        new = side.mover.connect(second.describe((0, 4)))
        assert new.key != old.key
        assert side.write(old, (side.address, first.address, PAGE)).state is TransferState.FAILED
        assert not any(second.read(0, PAGE))
        assert side.write(new, (side.address, second.address, PAGE)).state is TransferState.DONE
        assert second.read(0, PAGE) == b"\1" * PAGE


@watches_processes
def test_a_process_that_is_gone_cannot_be_connected_to(name: str, make: MakeSide) -> None:
    side = make()
    with Child(name) as child:
        stale = child.describe((0, 4))
    with Child(name) as successor:
        side.mover.connect(successor.describe((0, 4)))
        with pytest.raises(MoverError) as caught:
            side.mover.connect(stale)
        assert caught.value.code is ErrorCode.STALE_INCARNATION


@watches_processes
@pytest.mark.parametrize("pages", [1, BIG])
def test_a_write_to_a_killed_process_fails_and_is_quiet(name: str, make: MakeSide, pages: int) -> None:
    side = make(BIG)
    with Child(name, BIG) as child:
        peer = side.mover.connect(child.describe((0, BIG)))
        child.kill()
        status = side.write(peer, (side.address, child.address, pages * PAGE))
        assert status.state is TransferState.FAILED
        assert status.quiet
        assert str(child.pid) in status.reason


@watches_processes
def test_a_process_that_is_killed_while_writes_to_it_run_is_reported(name: str, make: MakeSide) -> None:
    side = make(BIG)
    with Child(name, BIG) as child:
        peer = side.mover.connect(child.describe((0, BIG)))
        transfers = [side.mover.submit(peer, Writes.of((side.address, child.address, BIG * PAGE))) for _ in range(16)]
        child.kill()
        assert settle(side.mover, transfers[-1]).state is TransferState.FAILED
        for transfer in transfers:
            assert settle(side.mover, transfer).quiet

"""What every mover promises. Each test is one rule; the parameter is the mover that has to keep it."""

from __future__ import annotations

import hashlib
import random
import threading
from array import array
from collections.abc import Callable

import pytest

from pdhandoff.engines.base import Extent, Memory, Mover, TransferState, Writes
from pdhandoff.errors import ErrorCode, MoverError
from support.movers import PAGE, MakeSide, Side, settle, soon


@pytest.mark.parametrize("nbytes", [1, 640, PAGE, 5 * PAGE + 3])
def test_bytes_are_visible_once_a_write_is_done(make: MakeSide, nbytes: int) -> None:
    writer, owner = make(), make()
    writer.put(random.Random(1).randbytes(8 * PAGE))
    peer = writer.connect(owner, owner.extent(1, 6))
    status = writer.write(peer, (writer.address + 7, owner.address + PAGE, nbytes))
    assert status.state is TransferState.DONE
    assert owner.bytes(PAGE, nbytes) == writer.bytes(7, nbytes)
    assert set(owner.bytes(0, PAGE) + owner.bytes(PAGE + nbytes)) == {0}


def test_a_large_batch_is_not_copied_by_the_caller(make: MakeSide) -> None:
    writer, owner = make(4096), make(4096)
    writer.put(random.Random(2).randbytes(4096 * PAGE))
    peer = writer.connect(owner, owner.extent(0, 4096))
    status = writer.write(peer, (writer.address, owner.address, 4096 * PAGE))
    assert status.state is TransferState.DONE
    assert owner.bytes() == writer.bytes()


def test_memory_is_zeroed_aligned_and_offers_the_buffer_protocol(make: MakeSide) -> None:
    side = make()
    assert side.address % side.mover.capabilities.alignment == 0
    view = memoryview(side.memory.owner)
    assert view.nbytes == side.memory.length
    assert not any(view)
    view[3] = 9
    assert side.bytes(3, 1) == b"\x09"


@pytest.mark.parametrize("writes", [(), ((0, 0, 0),), ((1, 2, 0), (-5, 1 << 50, 0))])
def test_nothing_moves_where_every_length_is_zero(make: MakeSide, writes: tuple[tuple[int, int, int], ...]) -> None:
    writer, owner = make(), make()
    writer.fill(1)
    peer = writer.connect(owner, owner.extent(0))
    assert writer.write(peer, *writes).state is TransferState.DONE
    assert not any(owner.bytes())


def test_zero_lengths_between_others_are_skipped(make: MakeSide) -> None:
    writer, owner = make(), make()
    writer.fill(1)
    peer = writer.connect(owner, owner.extent(0), owner.extent(4))
    far = owner.address + 4 * PAGE
    triples = [(writer.address, owner.address, 8), (0, 0, 0), (writer.address, far, 8), (3, 1 << 60, 0)]
    assert writer.write(peer, *triples).state is TransferState.DONE
    assert owner.bytes(0, 8) == owner.bytes(4 * PAGE, 8) == b"\1" * 8


@pytest.mark.parametrize(
    ("start", "length"),
    [
        (PAGE - 1, 1),  # one byte before the first extent
        (PAGE - 1, 2),
        (2 * PAGE, 1),  # one byte behind it
        (2 * PAGE - 1, 2),
        (PAGE, 2 * PAGE),  # into the gap
        (PAGE, 3 * PAGE),  # over the gap, into the next extent
        (0, 8 * PAGE),
        (-(1 << 30), 1),
        (1 << 40, 1),
    ],
)
def test_a_write_outside_the_grant_is_refused_with_nothing_written(make: MakeSide, start: int, length: int) -> None:
    writer, owner = make(), make()
    writer.fill(1)
    peer = writer.connect(owner, owner.extent(1), owner.extent(3))
    good = (writer.address, owner.address + PAGE, 16)
    for batch in (
        [good, (writer.address, owner.address + start, length)],
        [(writer.address, owner.address + start, length)],
    ):
        with pytest.raises(MoverError, match="nothing was written") as caught:
            writer.mover.submit(peer, Writes.of(*batch))
        assert caught.value.code is ErrorCode.OUT_OF_RANGE
    assert not any(owner.bytes())


def test_a_grant_to_one_handle_is_no_grant_to_another(make: MakeSide) -> None:
    writer, owner = make(), make()
    first = writer.connect(owner, owner.extent(0))
    second = writer.connect(owner, owner.extent(1))
    assert first.key == second.key
    with pytest.raises(MoverError):
        writer.mover.submit(second, Writes.of((writer.address, owner.address, 1)))
    assert writer.write(first, (writer.address, owner.address, 1)).state is TransferState.DONE


def test_who_is_granted_nothing_can_write_nothing(make: MakeSide) -> None:
    writer, owner = make(), make()
    peer = writer.connect(owner)
    with pytest.raises(MoverError):
        writer.mover.submit(peer, Writes.of((writer.address, owner.address, 1)))


@pytest.mark.parametrize(("start", "length"), [(-1, 1), (-1, 2), (8 * PAGE - 1, 2), (8 * PAGE, 1), (1 << 40, 1)])
def test_a_source_outside_registered_memory_is_refused(make: MakeSide, start: int, length: int) -> None:
    writer, owner = make(), make()
    peer = writer.connect(owner, owner.extent(0, 8))
    with pytest.raises(MoverError, match="registered") as caught:
        writer.mover.submit(peer, Writes.of((writer.address + start, owner.address, length)))
    assert caught.value.code is ErrorCode.OUT_OF_RANGE


def test_deregistered_memory_is_no_source_any_more(make: MakeSide) -> None:
    writer, owner = make(), make()
    peer = writer.connect(owner, owner.extent(0))
    writer.mover.deregister(writer.region)
    writer.mover.deregister(writer.region)
    with pytest.raises(MoverError):
        writer.mover.submit(peer, Writes.of((writer.address, owner.address, 1)))


def test_memory_of_the_caller_is_a_source_when_registered(make: MakeSide) -> None:
    writer, owner = make(), make()
    own = array("q", range(512))
    address, _ = own.buffer_info()
    region = writer.mover.register(Memory(address, 4096, owner=own))
    assert region.memory.address == address
    peer = writer.connect(owner, owner.extent(0))
    assert writer.write(peer, (address, owner.address, 4096)).state is TransferState.DONE
    assert owner.bytes(0, 4096) == own.tobytes()


@pytest.mark.slow
def test_a_hundred_thousand_descriptors_land_each_in_its_place(make: MakeSide) -> None:
    count, row = 100_000, 24
    pages = -(-count * row // PAGE)
    writer, owner = make(pages), make(pages)
    writer.put(random.Random(3).randbytes(count * row))
    order = list(range(count))
    random.Random(4).shuffle(order)
    column = array("q", [row]) * count
    source = array("q", range(writer.address, writer.address + count * row, row))
    destination = array("q", (owner.address + slot * row for slot in order))
    peer = writer.connect(owner, owner.extent(0, pages))
    transfer = writer.mover.submit(peer, Writes(source, destination, column))
    assert settle(writer.mover, transfer).state is TransferState.DONE
    expected = bytearray(count * row)
    rows = writer.bytes(0, count * row)
    for index, slot in enumerate(order):
        expected[slot * row : (slot + 1) * row] = rows[index * row : (index + 1) * row]
    assert owner.bytes(0, count * row) == bytes(expected)


@pytest.mark.parametrize(
    ("columns", "code"),
    [
        (([0], [0], [-1]), ErrorCode.MISUSE),
        (([0, 0], [0], [0]), ErrorCode.MISUSE),
        (([0], [0], [0, 0]), ErrorCode.MISUSE),
    ],
)
def test_columns_that_are_no_batch_are_refused(make: MakeSide, columns: tuple[list[int], ...], code: ErrorCode) -> None:
    writer, owner = make(), make()
    peer = writer.connect(owner, owner.extent(0))
    with pytest.raises(MoverError) as caught:
        writer.mover.submit(peer, Writes(*(array("q", column) for column in columns)))
    assert caught.value.code is code


def test_more_writes_than_the_capability_says_are_refused(make: MakeSide) -> None:
    writer, owner = make(), make()
    peer = writer.connect(owner, owner.extent(0))
    zeros = array("q", [0]) * (writer.mover.capabilities.max_writes + 1)
    with pytest.raises(MoverError) as caught:
        writer.mover.submit(peer, Writes(zeros, zeros, zeros))
    assert caught.value.code is ErrorCode.OVERSIZED


def _bad_extents(side: Side) -> list[list[Extent]]:
    return [
        [Extent(side.address + 8, PAGE)],
        [Extent(side.address, 100)],
        [Extent(side.address, 0)],
        [Extent(side.address, -PAGE)],
        [Extent(side.address - PAGE, 2 * PAGE)],
        [Extent(side.address, 9 * PAGE)],
        [Extent(1 << 40, PAGE)],
        [side.extent(0), Extent(1 << 40, PAGE)],
    ]


@pytest.mark.parametrize("index", range(8))
def test_only_aligned_extents_of_registered_memory_can_be_granted_or_fenced(make: MakeSide, index: int) -> None:
    writer, owner = make(), make()
    owner.fill(5)
    peer = owner.connect(writer)
    extents = _bad_extents(owner)[index]
    with pytest.raises(MoverError) as caught:
        owner.mover.describe(extents)
    assert caught.value.code is ErrorCode.OUT_OF_RANGE
    with pytest.raises(MoverError) as caught:
        owner.mover.fence(peer, extents, soon())
    assert caught.value.code is ErrorCode.OUT_OF_RANGE
    assert set(owner.bytes()) == {5}


def test_memory_that_is_not_registered_cannot_be_granted(make: MakeSide) -> None:
    owner = make()
    other = owner.mover.allocate(PAGE)
    with pytest.raises(MoverError):
        owner.mover.describe([Extent(other.address, PAGE)])


def test_a_final_answer_stays(make: MakeSide) -> None:
    writer, owner = make(), make()
    peer = writer.connect(owner, owner.extent(0))
    transfer = writer.mover.submit(peer, Writes.of((writer.address, owner.address, 8)))
    final = settle(writer.mover, transfer)
    owner.mover.close()
    assert writer.mover.poll(transfer) == final
    writer.mover.release(transfer)
    writer.mover.release(transfer)


def test_peers_are_known_by_incarnation(make: MakeSide) -> None:
    writer, owner, other = make(), make(), make()
    assert writer.connect(owner).key == writer.connect(owner, owner.extent(0)).key
    assert writer.connect(owner).key != writer.connect(other).key


def test_a_write_to_an_ended_peer_fails_and_is_quiet(make: MakeSide) -> None:
    writer, owner = make(), make()
    peer = writer.connect(owner, owner.extent(0))
    owner.mover.close()
    status = writer.write(peer, (writer.address, owner.address, 8))
    assert status.state is TransferState.FAILED
    assert status.quiet
    assert status.reason


def test_an_ended_peer_cannot_be_connected_to(make: MakeSide) -> None:
    writer, owner = make(), make()
    description = owner.mover.describe([owner.extent(0)])
    owner.mover.close()
    with pytest.raises(MoverError) as caught:
        writer.mover.connect(description)
    assert caught.value.code is ErrorCode.STALE_INCARNATION


def test_a_living_peer_is_never_quiet_and_an_ended_one_always(make: MakeSide) -> None:
    writer, owner = make(), make()
    peer = owner.connect(writer)
    assert not owner.mover.quiesce(peer, 0.0)
    writer.mover.close()
    assert owner.mover.quiesce(peer, soon())
    assert owner.mover.quiesce(peer, 0.0)


def test_close_is_final_and_idempotent(make: MakeSide) -> None:
    writer, owner = make(), make()
    peer = writer.connect(owner, owner.extent(0))
    writer.mover.close()
    writer.mover.close()
    calls: list[Callable[[Mover], object]] = [
        lambda mover: mover.allocate(1),
        lambda mover: mover.register(Memory(4096, 4096)),
        lambda mover: mover.connect(owner.mover.describe([])),
        lambda mover: mover.submit(peer, Writes.of()),
    ]
    for call in calls:
        with pytest.raises(MoverError) as caught:
            call(writer.mover)
        assert caught.value.code is ErrorCode.MISUSE


def test_a_fenced_extent_takes_no_write_of_an_earlier_grant(make: MakeSide) -> None:
    writer, owner = make(), make()
    writer.fill(7)
    peer = writer.connect(owner, owner.extent(0, 4))
    assert writer.write(peer, (writer.address, owner.address, 4 * PAGE)).state is TransferState.DONE
    owner.mover.fence(owner.connect(writer), [owner.extent(1, 2)], soon())
    owner.fill(0, PAGE, 2 * PAGE)
    assert owner.bytes() == b"\7" * PAGE + bytes(2 * PAGE) + b"\7" * PAGE + bytes(4 * PAGE)
    status = writer.write(peer, (writer.address, owner.address + PAGE, PAGE))
    assert status.state is TransferState.FAILED
    assert not any(owner.bytes(PAGE, 2 * PAGE))


def test_a_fence_leaves_the_grants_of_others_alone(make: MakeSide) -> None:
    fenced, writer, owner = make(), make(), make()
    writer.fill(3)
    peer = writer.connect(owner, owner.extent(0), owner.extent(2))
    owner.mover.fence(owner.connect(fenced), [owner.extent(1), owner.extent(3, 5)], soon())
    status = writer.write(peer, (writer.address, owner.address, PAGE), (writer.address, owner.address + 2 * PAGE, PAGE))
    if status.state is TransferState.FAILED:  # it may have to connect again, but it must be told
        peer = writer.connect(owner, owner.extent(0), owner.extent(2))
        triples = [(writer.address, owner.address + page * PAGE, PAGE) for page in (0, 2)]
        assert writer.write(peer, *triples).state is TransferState.DONE
    assert owner.bytes(0, 4 * PAGE) == (b"\3" * PAGE + bytes(PAGE)) * 2


def test_a_new_grant_of_fenced_memory_works_and_spans_old_and_new(make: MakeSide) -> None:
    writer, owner = make(), make()
    writer.put(random.Random(5).randbytes(8 * PAGE))
    me = owner.connect(writer)
    for extents in ([owner.extent(1)], [owner.extent(3, 2), owner.extent(6)], [owner.extent(0, 2)]):
        owner.mover.fence(me, extents, soon())
    peer = writer.connect(owner, owner.extent(0, 8))
    status = writer.write(
        peer,
        (writer.address, owner.address, 3 * PAGE + 100),
        (writer.address + 3 * PAGE + 100, owner.address + 3 * PAGE + 100, 5 * PAGE - 100),
    )
    assert status.state is TransferState.DONE
    assert owner.bytes() == writer.bytes()


def test_many_writers_at_once_do_not_disturb_each_other(make: MakeSide) -> None:
    share, count = 96, 6
    owner = make(share * count)
    writers = [make(share) for _ in range(count)]
    failures: list[str] = []

    def work(index: int) -> None:
        writer = writers[index]
        writer.put(random.Random(index).randbytes(share * PAGE))
        peer = writer.connect(owner, owner.extent(index * share, share))
        base = owner.address + index * share * PAGE
        for part in range(4):
            start, nbytes = part * share // 4 * PAGE, share // 4 * PAGE
            if writer.write(peer, (writer.address + start, base + start, nbytes)).state is not TransferState.DONE:
                failures.append(f"writer {index} part {part}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    expected = hashlib.sha256(b"".join(writer.bytes() for writer in writers)).hexdigest()
    assert hashlib.sha256(owner.bytes()).hexdigest() == expected


def test_one_mover_takes_calls_from_many_threads(make: MakeSide) -> None:
    writer, owner = make(64), make(64)
    if not writer.mover.capabilities.thread_safe:
        pytest.skip("this mover is used from one thread")
    writer.put(random.Random(6).randbytes(64 * PAGE))
    peer = writer.connect(owner, owner.extent(0, 64))
    failures: list[int] = []

    def work(index: int) -> None:
        for page in range(index, 64, 8):
            start = page * PAGE
            if (
                writer.write(peer, (writer.address + start, owner.address + start, PAGE)).state
                is not TransferState.DONE
            ):
                failures.append(page)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    assert owner.bytes() == writer.bytes()


def test_handles_of_something_else_are_refused(make: MakeSide) -> None:
    side = make()

    class Stranger:
        key = "stranger"

    with pytest.raises(MoverError):
        side.mover.submit(Stranger(), Writes.of())
    with pytest.raises(MoverError):
        side.mover.poll(object())
    with pytest.raises(MoverError):
        side.mover.quiesce(Stranger(), soon())
    with pytest.raises(MoverError):
        side.mover.fence(Stranger(), [side.extent(0)], soon())

"""What is special about the loopback mover: what it shares, what it believes, what it gives back."""

from __future__ import annotations

import errno
import gc
import os
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdhandoff.engines.base import Extent, Memory, MemoryKind, TransferState, Writes
from pdhandoff.engines.bounds import Runs
from pdhandoff.engines.loopback import LoopbackMover, arena, control, courier, create, remote, syscalls, wire
from pdhandoff.engines.loopback.files import SharedFile, open_shared
from pdhandoff.errors import ErrorCode, MoverError
from pdhandoff.ids import Incarnation
from pdhandoff.limits import DEFAULT_LIMITS, Limits
from support.movers import PAGE, MakeSide, Side, descriptors, mappings, settle, soon


@pytest.fixture
def pair(loopback: MakeSide) -> tuple[Side, Side]:
    return loopback(), loopback()


class Gate:
    """Stops the copying thread at its first copy, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        monkeypatch.setattr(courier, "copy", self._copy)

    def _copy(self, destination: int, source: int, length: int) -> None:
        self.reached.set()
        assert self.opened.wait(30)
        syscalls.copy(destination, source, length)


# what it gives back


def test_everything_is_given_back() -> None:
    gc.collect()
    before = descriptors(), mappings()
    sides = [Side(create(), 64) for _ in range(4)]
    for writer in sides:
        for owner in sides:
            peer = writer.connect(owner, owner.extent(0, 32))
            assert writer.write(peer, (writer.address, owner.address, 32 * PAGE)).state is TransferState.DONE
            for page in range(5):
                owner.mover.fence(owner.connect(writer), [owner.extent(page)], soon())
    for side in sides:
        side.mover.close()
    assert descriptors() == before[0]
    del peer, side, sides, writer, owner
    gc.collect()
    assert (descriptors(), mappings()) == before


def test_memory_goes_when_nobody_views_it(loopback: MakeSide) -> None:
    mover = loopback().mover
    before = descriptors(), mappings()
    memory = mover.allocate(PAGE)
    view = memory.owner[8:16]
    assert (descriptors(), mappings()) == (before[0] + 1, before[1] + 1)
    del memory
    gc.collect()
    assert mappings() == before[1] + 1
    view[0] = 1
    view.release()
    gc.collect()
    assert (descriptors(), mappings()) == before


def test_a_transfer_keeps_its_source_alive(loopback: MakeSide) -> None:
    writer, owner = loopback(), loopback(4096)
    source = writer.mover.allocate(4096 * PAGE)
    region = writer.mover.register(source)
    source.owner[:] = b"\5" * (4096 * PAGE)
    peer = writer.connect(owner, owner.extent(0, 4096))
    transfer = writer.mover.submit(peer, Writes.of((source.address, owner.address, 4096 * PAGE)))
    writer.mover.deregister(region)
    del source, region
    gc.collect()
    assert settle(writer.mover, transfer).state is TransferState.DONE
    assert owner.bytes() == b"\5" * (4096 * PAGE)


def test_memory_of_a_closed_mover_reads_zeros_and_takes_no_late_write(loopback: MakeSide) -> None:
    writer, owner = loopback(), loopback()
    writer.fill(6)
    peer = writer.connect(owner, owner.extent(0))
    writer.write(peer, (writer.address, owner.address, PAGE))
    view = owner.memory.owner
    assert view[0] == 6
    owner.mover.close()
    _store(peer, writer, owner.address, PAGE)
    assert not any(view)
    view[0] = 1


def test_a_file_is_closed_when_fences_have_replaced_all_of_it(loopback: MakeSide) -> None:
    owner = loopback(8)
    me = owner.connect(owner)
    before = descriptors()
    owner.mover.fence(me, [owner.extent(0, 3), owner.extent(3, 5)], soon())
    assert descriptors() == before
    for _ in range(20):
        owner.mover.fence(me, [owner.extent(2, 2)], soon())
    assert descriptors() == before + 1


def _store(peer: object, writer: Side, destination: int, nbytes: int) -> None:
    """What a copy that was already running does."""
    assert isinstance(peer, remote.LoopbackPeer)
    for local, source, length in peer.localise(Writes.of((writer.address, destination, nbytes))):
        writer.store(local, source, length)


# fences


def test_a_copy_that_was_running_when_the_fence_came_lands_nowhere(loopback: MakeSide) -> None:
    writer, owner = loopback(), loopback()
    writer.fill(9)
    peer = writer.connect(owner, owner.extent(0, 8))
    owner.mover.fence(owner.connect(writer), [owner.extent(2, 3)], soon())
    _store(peer, writer, owner.address, 8 * PAGE)
    assert owner.bytes() == b"\11" * 2 * PAGE + bytes(3 * PAGE) + b"\11" * 3 * PAGE
    fresh = writer.connect(owner, owner.extent(2, 3))
    assert writer.write(fresh, (writer.address, owner.address + 2 * PAGE, 3 * PAGE)).state is TransferState.DONE
    assert owner.bytes() == writer.bytes()


@pytest.mark.parametrize("pages", [1, 100, 4096])  # copied at once, in one slice, in several
@pytest.mark.slow
def test_a_fence_while_a_batch_is_copied_fails_that_batch(
    loopback: MakeSide, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    writer, owner = loopback(pages), loopback(pages)
    writer.fill(9)
    peer = writer.connect(owner, owner.extent(0, pages))
    me = owner.connect(writer)
    gate = Gate(monkeypatch)
    batch = Writes.of((writer.address, owner.address, pages * PAGE))
    with ThreadPoolExecutor(1) as pool:
        submitted = pool.submit(writer.mover.submit, peer, batch)
        assert gate.reached.wait(30)
        owner.mover.fence(me, [owner.extent(0, pages)], soon())
        gate.opened.set()
        status = settle(writer.mover, submitted.result(30))
    assert (status.state, status.quiet) == (TransferState.FAILED, True)
    assert not any(owner.bytes())


def test_a_peer_that_ends_while_a_batch_is_copied_fails_that_batch(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, owner = pair
    peer = writer.connect(owner, owner.extent(0))
    gate = Gate(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        submitted = pool.submit(writer.mover.submit, peer, Writes.of((writer.address, owner.address, PAGE)))
        assert gate.reached.wait(30)
        owner.mover.close()
        gate.opened.set()
        assert settle(writer.mover, submitted.result(30)).state is TransferState.FAILED


@pytest.mark.slow
@pytest.mark.parametrize("pages", [1, 100])  # copied by the caller, by the thread
def test_a_mover_has_not_ended_before_its_last_copy_has(
    loopback: MakeSide, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    writer, owner = loopback(pages), loopback(pages)
    writer.fill(5)
    peer = writer.connect(owner, owner.extent(0, pages))
    watching = owner.connect(writer)
    gate = Gate(monkeypatch)
    batch = Writes.of((writer.address, owner.address, pages * PAGE))
    with ThreadPoolExecutor(2) as pool:
        submitted = pool.submit(writer.mover.submit, peer, batch)
        assert gate.reached.wait(30)
        closed = pool.submit(writer.mover.close)
        with pytest.raises(TimeoutError):
            closed.result(0.1)  # a mover that does not wait would be closed by now
        assert not owner.mover.quiesce(watching, 0.0)
        gate.opened.set()
        closed.result(30)
        submitted.result(30)
    assert owner.mover.quiesce(watching, 0.0)
    first = owner.bytes()
    assert owner.bytes() == first


def test_closing_waits_for_the_copy_that_runs_and_fails_the_rest(
    loopback: MakeSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, owner = loopback(4096), loopback(4096)
    peer = writer.connect(owner, owner.extent(0, 4096))
    watching = owner.connect(writer)
    gate = Gate(monkeypatch)
    batch = Writes.of((writer.address, owner.address, 4096 * PAGE))
    transfers = [writer.mover.submit(peer, batch) for _ in range(3)]
    assert gate.reached.wait(30)
    closer = threading.Thread(target=writer.mover.close)
    closer.start()
    assert not owner.mover.quiesce(watching, 0.0)
    gate.opened.set()
    closer.join(30)
    assert owner.mover.quiesce(watching, 0.0)
    for transfer in transfers:
        status = writer.mover.poll(transfer)
        assert (status.state, status.quiet) == (TransferState.FAILED, True)


def test_a_small_batch_is_done_when_submit_returns(loopback: MakeSide) -> None:
    writer, owner = loopback(64), loopback(64)
    peer = writer.connect(owner, owner.extent(0, 64))
    transfer = writer.mover.submit(peer, Writes.of((writer.address, owner.address, courier.INLINE_BYTES)))
    assert writer.mover.poll(transfer).state is TransferState.DONE


@pytest.mark.slow
def test_a_large_batch_does_not_hold_up_another(loopback: MakeSide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier, "_SLICE_BYTES", PAGE)
    writer, owner = loopback(4096), loopback(4096)
    peer = writer.connect(owner, owner.extent(0, 4096))
    order: list[int] = []
    gate = Gate(monkeypatch)
    ends = courier.LoopbackTransfer.end

    def note(transfer: courier.LoopbackTransfer, status: object) -> None:
        order.append(id(transfer))
        ends(transfer, status)  # type: ignore[arg-type]

    monkeypatch.setattr(courier.LoopbackTransfer, "end", note)
    large = writer.mover.submit(peer, Writes.of((writer.address, owner.address, 4096 * PAGE)))
    small = writer.mover.submit(peer, Writes.of((writer.address, owner.address, 65 * PAGE)))
    gate.opened.set()
    settle(writer.mover, large)
    settle(writer.mover, small)
    assert order == [id(small), id(large)]


def test_a_full_queue_is_told_and_nothing_starts(loopback: MakeSide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier, "MAX_QUEUED", 0)
    writer, owner = loopback(128), loopback(128)
    writer.fill(1)
    peer = writer.connect(owner, owner.extent(0, 128))
    with pytest.raises(MoverError) as caught:
        writer.mover.submit(peer, Writes.of((writer.address, owner.address, 128 * PAGE)))
    assert caught.value.code is ErrorCode.BUSY
    assert caught.value.retryable
    assert not any(owner.bytes())


def test_mappings_of_a_peer_without_grants_are_bounded(loopback: MakeSide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_KEPT_MAPPINGS", 2)
    writer, owner = loopback(), loopback()
    me = owner.connect(writer)
    before = mappings()
    for _ in range(6):
        owner.mover.fence(me, [owner.extent(0)], soon())
        peer = writer.connect(owner, owner.extent(0))
        assert writer.write(peer, (writer.address, owner.address, 9)).state is TransferState.DONE
    del peer
    gc.collect()
    assert mappings() <= before + 3  # one is the fenced page of the owner itself


# when the host has no more


def _no_room(*_: object, **__: object) -> int:
    raise MoverError(ErrorCode.MOVER_FAILED, "no room for a mapping")


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_fence_that_fails_leaves_extents_and_grants_as_they_were(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, owner = pair
    writer.fill(2)
    owner.fill(1)
    peer = writer.connect(owner, owner.extent(0, 8))
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(arena, "map_file", _no_room)
        with pytest.raises(MoverError, match="no room"):
            owner.mover.fence(owner.connect(writer), [owner.extent(1, 2)], soon())
    assert owner.bytes() == b"\1" * 8 * PAGE
    assert writer.write(peer, (writer.address, owner.address, 8 * PAGE)).state is TransferState.DONE
    assert owner.bytes() == writer.bytes()
    assert descriptors() == before + 1  # the writer's proof of life, which the owner watches since


def test_memory_that_cannot_be_mapped_is_not_allocated(loopback: MakeSide, monkeypatch: pytest.MonkeyPatch) -> None:
    mover = loopback().mover
    before = descriptors()
    with pytest.raises(MoverError, match="mapping"):
        mover.allocate((1 << 47) - PAGE)  # more than a process can address
    monkeypatch.setattr(arena, "map_file", _no_room)
    with pytest.raises(MoverError, match="no room"):
        mover.allocate(PAGE)
    monkeypatch.setattr(os, "ftruncate", _no_space)
    with pytest.raises(MoverError, match="No space") as caught:
        mover.allocate(PAGE)
    assert caught.value.code is ErrorCode.MOVER_FAILED
    assert descriptors() == before


def test_running_out_of_descriptors_is_a_typed_error(pair: tuple[Side, Side]) -> None:
    writer, owner = pair
    peer = writer.connect(owner, owner.extent(0))
    me = owner.connect(writer)
    owner.fill(3)
    description = owner.mover.describe([owner.extent(1)])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(MoverError, match="Too many open files"):
            owner.mover.allocate(PAGE)
        with pytest.raises(MoverError, match="Too many open files"):
            owner.mover.fence(me, [owner.extent(0)], soon())
        with pytest.raises(MoverError, match="Too many open files"):
            create()
        assert writer.write(peer, (writer.address, owner.address, 1)).state is TransferState.DONE
        assert writer.mover.connect(description).key == peer.key  # its file is mapped already
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert owner.bytes(1) == b"\3" * (8 * PAGE - 1)


def test_a_mover_that_closes_while_it_fences_maps_nothing_new() -> None:
    allocation = arena.Arena(2 * PAGE)
    memory = allocation.memory(2 * PAGE)
    allocation.close()
    before = descriptors()
    with pytest.raises(MoverError) as caught:
        allocation.fence([Extent(memory.address, PAGE)])
    assert caught.value.code is ErrorCode.MISUSE
    assert descriptors() == before
    assert not any(memory.owner)


# what it believes


def test_gpu_memory_is_for_other_movers() -> None:
    mover = create()
    for call in (
        lambda: mover.allocate(1, MemoryKind.CUDA),
        lambda: mover.register(Memory(PAGE, PAGE, MemoryKind.CUDA)),
    ):
        with pytest.raises(MoverError, match="CPU memory only"):
            call()
    mover.close()


def test_a_mover_that_ends_while_it_is_connected_to_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    life = control.Life()

    def open_too_late(pid: int, fd: int, cookie: bytes, data_bytes: int) -> int:
        opened = open_shared(pid, fd, cookie, data_bytes)
        life.end()
        return opened

    monkeypatch.setattr(control, "open_shared", open_too_late)
    with pytest.raises(MoverError) as caught:
        control.Pulse(life.pid, life.fd, life.incarnation)
    assert caught.value.code is ErrorCode.STALE_INCARNATION


def test_a_closed_mover_has_ended_though_a_forked_child_shares_its_lock() -> None:
    life = control.Life()
    pulse = control.Pulse(life.pid, life.fd, life.incarnation)
    inherited = os.dup(life.fd)  # what a fork leaves in the child
    seen = [pulse.ended]
    life.end()
    seen.append(pulse.ended)
    assert seen == [False, True]
    os.close(inherited)


def test_what_is_submitted_while_the_mover_closes_is_refused(pair: tuple[Side, Side]) -> None:
    writer, owner = pair
    peer = writer.connect(owner, owner.extent(0, 8))
    assert isinstance(peer, remote.LoopbackPeer)
    closed = courier.Courier()
    closed.close()
    closed.close()
    transfer = courier.LoopbackTransfer(peer, Writes.of((writer.address, owner.address, 1)), ())
    for submit in (closed.run, closed.put):
        with pytest.raises(MoverError) as caught:
            submit(transfer)
        assert caught.value.code is ErrorCode.MISUSE


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 47, 1 << 63, 1 << 64])
def test_an_impossible_size_cannot_be_allocated(loopback: MakeSide, nbytes: int) -> None:
    with pytest.raises(MoverError) as caught:
        loopback().mover.allocate(nbytes)
    assert caught.value.code is ErrorCode.OUT_OF_RANGE


@pytest.mark.parametrize(("address", "length"), [(0, PAGE), (-PAGE, PAGE), (PAGE, 0), (PAGE, -1)])
def test_what_is_no_memory_cannot_be_registered(loopback: MakeSide, address: int, length: int) -> None:
    with pytest.raises(MoverError) as caught:
        loopback().mover.register(Memory(address, length))
    assert caught.value.code is ErrorCode.OUT_OF_RANGE


def test_overlapping_extents_are_no_grant(loopback: MakeSide) -> None:
    owner = loopback()
    with pytest.raises(MoverError, match="overlaps"):
        owner.mover.describe([owner.extent(0, 2), owner.extent(1)])


def test_a_grant_names_nothing_but_its_extents(loopback: MakeSide) -> None:
    owner = loopback()
    description = wire.decode(owner.mover.describe([owner.extent(5, 2), owner.extent(1)]))
    assert [(s.address, s.length) for s in description.segments] == [owner.extent(1), owner.extent(5, 2)]
    assert wire.decode(owner.mover.describe([])).segments == ()


@pytest.mark.slow
def test_too_many_extents_for_one_grant_are_refused(loopback: MakeSide) -> None:
    count = 4 * DEFAULT_LIMITS.max_extents + 1
    owner = loopback(count)
    with pytest.raises(MoverError) as caught:
        owner.mover.describe([owner.extent(page) for page in range(count)])
    assert caught.value.code is ErrorCode.OVERSIZED
    small = Limits(max_descriptor_bytes=64)
    description = wire.decode(owner.mover.describe([owner.extent(0)]))
    with pytest.raises(MoverError) as caught:
        wire.encode(description, small)
    assert caught.value.code is ErrorCode.OVERSIZED
    with pytest.raises(MoverError) as caught:
        wire.decode(wire.encode(description), small)
    assert caught.value.code is ErrorCode.OVERSIZED


def _lies(honest: wire.Description) -> dict[str, wire.Description]:
    file, segment, change = honest.files[0], honest.segments[0], msgspec.structs.replace
    return {
        "unaligned address": change(honest, segments=(change(segment, address=segment.address + 8),)),
        "unaligned length": change(honest, segments=(change(segment, length=PAGE - 8),)),
        "no length": change(honest, segments=(change(segment, length=0),)),
        "unaligned offset": change(honest, segments=(change(segment, offset=8),)),
        "beyond its file": change(honest, segments=(change(segment, offset=file.data_bytes),)),
        "unknown file": change(honest, segments=(change(segment, file=1),)),
        "overlap": change(honest, segments=(segment, segment)),
        "file of no pages": change(honest, files=(change(file, data_bytes=0),), segments=()),
        "unaligned file": change(honest, files=(change(file, data_bytes=PAGE + 1),)),
        "larger file": change(honest, files=(change(file, data_bytes=file.data_bytes + PAGE),)),
        "smaller file": change(honest, files=(change(file, data_bytes=file.data_bytes - PAGE),)),
        "another cookie": change(honest, files=(change(file, cookie=bytes(16)),)),
        "another file": change(honest, files=(change(file, fd=honest.control_fd),)),
        "another incarnation": change(honest, incarnation=bytes(16)),
        "another process": change(honest, pid=1),
        "no process": change(honest, pid=(1 << 31) - 1),
        "no descriptor": change(honest, control_fd=(1 << 31) - 1),
    }


@pytest.mark.parametrize("lie", range(17))
def test_a_description_that_lies_is_refused(loopback: MakeSide, lie: int) -> None:
    writer, owner = loopback(), loopback()
    honest = wire.decode(owner.mover.describe([owner.extent(0, 2)]))
    lies = _lies(honest)
    assert len(lies) == 17
    name, description = list(lies.items())[lie]
    with pytest.raises(MoverError) as caught:
        writer.mover.connect(wire.encode(description))
    assert caught.value.code in {ErrorCode.MALFORMED, ErrorCode.STALE_INCARNATION}, name


def test_nothing_but_a_sealed_shared_file_is_ever_opened_for_writing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * PAGE))
    pipe = os.pipe()
    handle = os.open(path, os.O_RDWR)
    os.mkfifo(tmp_path / "fifo")
    fifo = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)  # to open it again would block for ever
    unsealed = os.memfd_create("pdhandoff")
    cookie = bytes(Incarnation.mint())
    honest = SharedFile(PAGE, cookie)
    os.ftruncate(unsealed, 3 * PAGE)
    os.pwrite(unsealed, os.pread(honest.fd, PAGE, 2 * PAGE), 2 * PAGE)
    os.pwrite(handle, os.pread(honest.fd, PAGE, 2 * PAGE), 2 * PAGE)
    with socket.socket() as sock:
        for fd in (*pipe, fifo, handle, unsealed, sock.fileno(), os.open(tmp_path, os.O_RDONLY)):
            with pytest.raises(MoverError) as caught:
                open_shared(os.getpid(), fd, cookie, PAGE)
            assert caught.value.code is ErrorCode.STALE_INCARNATION
            if fd != sock.fileno():
                os.close(fd)
    os.close(open_shared(os.getpid(), honest.fd, cookie, PAGE))
    honest.close()
    honest.close()


def test_a_shared_file_can_be_neither_cut_nor_grown() -> None:
    file = SharedFile(PAGE, bytes(16))
    for size in (0, 100 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(file.fd, size)
    file.close()


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(garbage=st.binary(max_size=400))
def test_garbage_is_no_description(garbage: bytes) -> None:
    with pytest.raises(MoverError) as caught:
        wire.decode(garbage)
    assert caught.value.code is ErrorCode.MALFORMED


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_description_gives_a_peer_or_a_typed_error(pair: tuple[Side, Side], data: st.DataObject) -> None:
    writer, owner = pair
    good = bytearray(owner.mover.describe([owner.extent(0), owner.extent(2, 3)]))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)))
    codes = {ErrorCode.MALFORMED, ErrorCode.OVERSIZED, ErrorCode.STALE_INCARNATION}
    try:
        seen = len(writer.mover.connect(bytes(good[:cut])).key)
    except MoverError as error:
        seen = error.code
    assert seen in codes | {32}


def test_deep_nesting_is_no_description() -> None:
    with pytest.raises(MoverError):
        wire.decode(b"\x91" * 100_000)


# ranges


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    runs=st.lists(st.tuples(st.integers(1, 60), st.integers(-2, 12)), max_size=8),
    batch=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 14)), max_size=12),
)
def test_runs_agree_with_a_set_of_addresses(runs: list[tuple[int, int]], batch: list[tuple[int, int]]) -> None:
    inside = {address for start, length in runs for address in range(start, start + length)}
    checked = Runs(runs)
    fits = [all(address in inside for address in range(start, start + length)) for start, length in batch]
    assert [checked.covers(start, length) for start, length in batch] == fits
    writes = Writes.of(*((start, start, length) for start, length in batch))
    expected = fits.index(False) if False in fits else None
    assert checked.first_outside(writes.destination, writes.length) == expected


def test_the_largest_addresses_do_not_wrap() -> None:
    runs = Runs([(1 << 46, 1 << 20)])
    high = (1 << 63) - 1
    assert not runs.covers(high, high)
    assert runs.first_outside(Writes.of((0, high, high)).destination, Writes.of((0, high, high)).length) == 0


def test_two_movers_of_one_process_are_two_incarnations() -> None:
    first, second = LoopbackMover(), LoopbackMover()
    assert first.connect(second.describe([])).key != first.connect(first.describe([])).key
    assert not first.quiesce(first.connect(first.describe([])), 0.0)
    first.close()
    second.close()


def test_an_extent_of_freed_memory_cannot_be_granted(loopback: MakeSide) -> None:
    mover = loopback().mover
    memory = mover.allocate(PAGE)
    extent = Extent(memory.address, PAGE)
    del memory
    gc.collect()
    with pytest.raises(MoverError):
        mover.describe([extent])

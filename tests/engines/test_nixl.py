"""The parts of the NIXL mover, and what it refuses."""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import random
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdhandoff.engines import nixl as package
from pdhandoff.engines import registry
from pdhandoff.engines.base import Extent, Memory, MemoryKind, Peer, TransferState, Writes
from pdhandoff.engines.nixl import binding, wire
from pdhandoff.engines.nixl import tiles as tiles_module
from pdhandoff.engines.nixl.binding import Descriptor
from pdhandoff.engines.nixl.mover import NixlMover, create
from pdhandoff.engines.nixl.tiles import BATCH_BYTES, BATCH_WRITES, FEW_WRITES, Tiles, batches
from pdhandoff.engines.nixl.transports import DEFAULT_TRANSPORTS, direct
from pdhandoff.errors import ErrorCode, MoverError
from support.movers import PAGE, Side, settle
from support.nixl_fixtures import MakeSide, library, make
from support.transfer_engines import TCP, nixl

__all__ = ["library", "make"]

CPU, CUDA = MemoryKind.CPU, MemoryKind.CUDA


@pytest.mark.parametrize(
    ("transports", "kind", "found"),
    [
        (DEFAULT_TRANSPORTS, CPU, set()),
        (DEFAULT_TRANSPORTS, CUDA, {"cuda_ipc"}),
        ("tcp,self", CPU, set()),
        ("tcp,self,sm", CPU, {"cma", "knem", "xpmem"}),
        ("tcp,cma", CPU, {"cma"}),
        ("tcp,\\cma", CPU, {"cma"}),
        ("rc, cuda", CUDA, {"cuda_ipc"}),
        ("rc,cuda_copy", CUDA, set()),
        ("all", CPU, {"cma", "knem", "xpmem"}),
        ("^sm", CPU, set()),
        ("^tcp", CPU, {"cma", "knem", "xpmem"}),
        ("^cuda", CUDA, set()),
        ("tcp,mm", CPU, {"xpmem"}),
    ],
)
def test_transports_that_need_no_help_of_the_owner_are_known(
    transports: str, kind: MemoryKind, found: set[str]
) -> None:
    assert direct(transports, kind) == found


def _runs(*runs: tuple[int, int], kind: MemoryKind = CPU) -> Tiles:
    return Tiles(Descriptor(address, length, 0, kind) for address, length in runs)


def test_writes_are_cut_where_registrations_meet() -> None:
    sources, destinations = _runs((0, 100), (100, 50)), _runs((1000, 30), (1030, 90))
    found = batches(Writes.of((90, 1010, 60), (0, 1029, 2), (7, 3, 0)), sources, destinations)
    rows = [
        (int(s[0]), int(d[0]), int(s[1]))
        for batch in found
        for s, d in zip(batch.source, batch.destination, strict=True)
    ]
    assert sorted(rows) == [(0, 1029, 1), (1, 1030, 1), (90, 1010, 10), (100, 1020, 10), (110, 1030, 40)]


@pytest.mark.parametrize("few", [0, FEW_WRITES])
def test_random_writes_arrive_whole_however_they_are_cut(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    monkeypatch.setattr(tiles_module, "FEW_WRITES", few)
    rng = random.Random(1)
    for _ in range(200):
        edges = sorted({0, 400, *rng.choices(range(400), k=5)})
        tiles = _runs(*((low, high - low) for low, high in itertools.pairwise(edges)))
        writes = [(s := rng.randrange(400), d := rng.randrange(400), rng.randrange(401 - max(s, d))) for _ in range(4)]
        expected = sorted((s + i, d + i) for s, d, n in writes for i in range(n))
        found = batches(Writes.of(*writes), tiles, tiles)
        moved = [
            (int(s[0]) + i, int(d[0]) + i)
            for batch in found
            for s, d in zip(batch.source, batch.destination, strict=True)
            for i in range(int(s[1]))
        ]
        assert sorted(moved) == expected


@pytest.mark.parametrize("bad", [(-1, 0, 1), (0, -1, 1), (399, 0, 2), (0, 399, 2), (400, 0, 1), (1 << 62, 0, 1)])
def test_a_write_that_leaves_its_registrations_is_named(bad: tuple[int, int, int]) -> None:
    tiles = _runs((0, 200), (200, 200))
    with pytest.raises(MoverError, match="write 1: ") as caught:
        batches(Writes.of((0, 0, 400), bad), tiles, tiles)
    assert caught.value.code is ErrorCode.OUT_OF_RANGE


def test_memory_of_two_kinds_is_posted_apart() -> None:
    sources = Tiles([Descriptor(0, 100, 0, CPU), Descriptor(200, 100, 3, CUDA)])
    found = batches(Writes.of((0, 1, 5), (200, 9, 5), (10, 20, 5)), sources, _runs((0, 100)))
    assert [(batch.kinds, len(batch.source)) for batch in found] == [((CPU, CPU), 2), ((CUDA, CPU), 1)]
    assert int(found[1].source[0, 2]) == 3


def test_batches_are_bounded() -> None:
    tiles = _runs((0, 1 << 40))
    small = array("q", [1]) * 2500
    assert [len(batch.source) for batch in batches(Writes(small, small, small), tiles, tiles)] == [
        BATCH_WRITES,
        BATCH_WRITES,
        2500 - 2 * BATCH_WRITES,
    ]
    large = array("q", [BATCH_BYTES * 3 // 4]) * 3
    zero = array("q", [0]) * 3
    assert [len(batch.source) for batch in batches(Writes(zero, zero, large), tiles, tiles)] == [1, 1, 1]


def _description(**changes: object) -> wire.Description:
    whole = wire.Description(
        bytes(16), bytes(16), bytes(16), 1, 5, 2, (b"m",), (wire.PartWire(0, 8, False, 0), wire.PartWire(8, 8, True, 1))
    )
    return msgspec.structs.replace(whole, **changes)


def test_descriptions_survive_the_wire() -> None:
    assert wire.decode(wire.encode(_description())) == _description()


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"\x80\x04K\x01.",  # a pickle
        b"\xc1" * 50,
        wire.encode(_description())[:-1],
        wire.encode(_description()) + b"\0",
        wire.encode(_description(life=0)),
        wire.encode(_description(metadata=())),
        wire.encode(_description(metadata=(b"a", b"b", b"c", b"d"))),
        wire.encode(_description(parts=())),
        wire.encode(_description(parts=(wire.PartWire(0, 0, False, 0),))),
        wire.encode(_description(parts=(wire.PartWire(0, 9, False, 0), wire.PartWire(8, 8, False, 0)))),
        wire.encode(_description(parts=(wire.PartWire(-1, 9, False, 0),))),
        wire.encode(_description(parts=(wire.PartWire(1 << 47, 9, False, 0),))),
        wire.encode(_description(incarnation=bytes(15))),
        wire.encode(_description(pid=-1)),
    ],
)
def test_garbage_is_no_description(encoded: bytes) -> None:
    with pytest.raises(MoverError) as caught:
        wire.decode(encoded)
    assert caught.value.code is ErrorCode.MALFORMED


def test_oversized_descriptions_are_refused_at_both_ends() -> None:
    large = msgspec.msgpack.encode(_description(metadata=(bytes(2 << 20),)))
    calls: list[Callable[[], object]] = [
        lambda: wire.decode(large),
        lambda: wire.encode(_description(metadata=(bytes(2 << 20),))),
    ]
    for call in calls:
        with pytest.raises(MoverError) as caught:
            call()
        assert caught.value.code is ErrorCode.OVERSIZED


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"transport": "tcp"}, "transport"),
        ({"transports": " "}, "transports"),
        ({"workers": 0}, "workers"),
        ({"progress_delay_us": -1}, "progress_delay_us"),
        ({"call_s": 0.0}, "call_s"),
        ({"close_s": float("inf")}, "close_s"),
        ({"ucx": {"UCX_NET_DEVICES": "lo"}}, "UCX_NET_DEVICES"),
        ({"ucx": {"TLS": "tcp"}}, "transports"),
        ({"workers": "one"}, "workers"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(MoverError, match=named) as caught:
        create(**options)
    assert caught.value.code is ErrorCode.CONFIG


def test_transports_that_do_not_exist_are_named() -> None:
    with pytest.raises(MoverError, match="'pigeon'") as caught:
        create(transports="pigeon")
    assert caught.value.code is ErrorCode.MOVER_FAILED


def _without_wheel(monkeypatch: pytest.MonkeyPatch, failure: Callable[[str], Exception]) -> None:
    def refuse(name: str, package: str | None = None) -> object:
        del package
        raise failure(name)

    monkeypatch.setattr(importlib, "import_module", refuse)


def test_a_missing_wheel_is_named_with_what_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_wheel(monkeypatch, lambda name: ModuleNotFoundError("no", name=name.split(".")[0]))
    with pytest.raises(MoverError, match=r"pip install 'pdhandoff\[nixl\]'") as caught:
        binding.load()
    assert caught.value.code is ErrorCode.CONFIG


def test_what_comes_with_the_wheel_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_wheel(monkeypatch, lambda _: ModuleNotFoundError("no", name="numpy"))
    with pytest.raises(MoverError, match=r"needs numpy.*pip install 'pdhandoff\[nixl\]'") as caught:
        package.create()
    assert caught.value.code is ErrorCode.CONFIG


def test_a_wheel_that_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_wheel(monkeypatch, lambda _: ImportError("libcudart.so.13: cannot open shared object file"))
    with pytest.raises(MoverError, match=r"nixl_cu13: libcudart\.so\.13") as caught:
        binding.load()
    assert caught.value.code is ErrorCode.CONFIG


@pytest.mark.slow
def test_ucx_says_nothing_on_standard_output() -> None:
    program = (
        "from support.transfer_engines import nixl\n"
        "from support.movers import Side\n"
        "writer, owner = Side(nixl()), Side(nixl())\n"
        "peer = writer.connect(owner, owner.extent(0))\n"
        "owner.mover.close()\n"
        "writer.write(peer, (writer.address, owner.address, 8))\n"
        "writer.mover.close()\n"
    )
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), str(root / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "UCX_LOG_LEVEL": "info"}
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, env=environment)
    assert ran.stdout == b""
    assert b"UCX" in ran.stderr


@pytest.mark.slow
def test_the_library_is_not_loaded_before_a_mover_is_made() -> None:
    program = (
        "import sys, pdhandoff, pdhandoff.engines.registry as r; assert 'nixl' in r.known();"
        "import pdhandoff.engines.nixl; sys.exit(bool({'torch', 'numpy', 'nixl_cu13', 'nixl'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=root).returncode == 0


def test_the_registry_makes_one() -> None:
    mover = registry.create("nixl", transports=TCP)
    assert isinstance(mover, NixlMover)
    assert mover.capabilities.fence
    assert not mover.capabilities.quiesce
    mover.close()


def test_settings_of_ucx_do_not_stay_in_the_environment() -> None:
    before = dict(os.environ)
    create(transports=TCP, ucx={"NET_DEVICES": "lo"}).close()
    assert dict(os.environ) == before


def test_metadata_of_another_agent_is_refused(make: MakeSide) -> None:
    writer, owner, other = make(), make(), make()
    real = wire.decode(owner.mover.describe([owner.extent(0)]))
    foreign = wire.decode(other.mover.describe([other.extent(0)]))
    stranger = writer.connect(other, other.extent(0))
    for metadata in (
        foreign.metadata,
        (b"garbage",),
        (real.metadata[0][:-9],),
        (*real.metadata[:-1], real.metadata[-1][:-9]),
        (*real.metadata[:-1], b"garbage"),
        (*real.metadata[:-1], foreign.metadata[-1]),
    ):
        with pytest.raises(MoverError) as caught:
            writer.mover.connect(wire.encode(msgspec.structs.replace(real, metadata=metadata)))
        assert caught.value.code is ErrorCode.MALFORMED
    peer = writer.connect(owner, owner.extent(0))
    assert writer.write(peer, (writer.address, owner.address, 9)).state is TransferState.DONE
    assert writer.write(stranger, (writer.address, other.address, 9)).state is TransferState.DONE


def test_overlapping_grants_work_side_by_side(make: MakeSide) -> None:
    writer, owner = make(), make()
    peers = [writer.connect(owner, owner.extent(*pages)) for pages in ((2, 2), (0, 8), (3, 4), (1, 1))]
    writer.put(random.Random(3).randbytes(8 * PAGE))
    for peer, (first, pages) in zip(peers, ((2, 2), (0, 8), (3, 4), (1, 1)), strict=True):
        owner.fill(0)
        start = first * PAGE
        write = (writer.address + start, owner.address + start, pages * PAGE)
        assert writer.write(peer, write).state is TransferState.DONE
        assert owner.bytes(start, pages * PAGE) == writer.bytes(start, pages * PAGE)


def test_overlapping_registrations_are_refused(make: MakeSide) -> None:
    side = make()
    with pytest.raises(MoverError, match="overlap") as caught:
        side.mover.register(Memory(side.address + PAGE, PAGE))
    assert caught.value.code is ErrorCode.OUT_OF_RANGE
    side.mover.deregister(side.region)
    side.mover.deregister(side.mover.register(Memory(side.address + PAGE, PAGE)))


def test_memory_is_deregistered_only_when_no_write_reads_it(make: MakeSide) -> None:
    writer, owner = make(16384), make(16384)
    writer.fill(5)
    peer = writer.connect(owner, owner.extent(0, 16384))
    transfer = writer.mover.submit(peer, Writes.of((writer.address, owner.address, 16384 * PAGE)))
    writer.mover.deregister(writer.region)
    with pytest.raises(MoverError):
        writer.mover.submit(peer, Writes.of((writer.address, owner.address, 1)))
    assert settle(writer.mover, transfer).state is TransferState.DONE
    assert owner.bytes() == b"\5" * 16384 * PAGE
    writer.region = writer.mover.register(writer.memory)


def test_a_released_write_goes_on(make: MakeSide) -> None:
    writer, owner = make(4096), make(4096)
    writer.fill(5)
    peer = writer.connect(owner, owner.extent(0, 4096))
    transfer = writer.mover.submit(peer, Writes.of((writer.address, owner.address, 4096 * PAGE)))
    writer.mover.release(transfer)
    deadline = time.monotonic() + 30
    while owner.bytes(4096 * PAGE - 1) != b"\5":
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


def test_closing_ends_what_is_under_way(make: MakeSide) -> None:
    writer, owner = make(4096), make(4096)
    peer = writer.connect(owner, owner.extent(0, 4096))
    transfers = [writer.mover.submit(peer, Writes.of((writer.address, owner.address, 4096 * PAGE))) for _ in range(40)]
    writer.mover.close()
    states = {writer.mover.poll(transfer).state for transfer in transfers}
    assert TransferState.PENDING not in states
    assert "closed" in writer.mover.poll(transfers[-1]).reason


def test_a_call_that_never_comes_back_keeps_no_other_waiting_for_good() -> None:
    mover = create(transports=TCP, call_s=0.05)
    side = Side(mover)
    peer = side.connect(side, side.extent(0))
    writes = Writes.of((side.address, side.address, 8))
    lock = mover._sender._lock
    lock.acquire()  # somebody is inside NIXL and does not return
    try:
        transfer = mover.submit(peer, writes)
        assert mover.poll(transfer).state is TransferState.PENDING
        calls: list[Callable[[], object]] = [
            lambda: mover.connect(mover.describe([side.extent(0)])),
            lambda: mover.register(Memory(1 << 40, PAGE)),
        ]
        for call in calls:
            with pytest.raises(MoverError) as caught:
                call()
            assert caught.value.code is ErrorCode.BUSY
    finally:
        lock.release()
    assert settle(mover, transfer).state is TransferState.DONE
    mover.close()


def test_a_fence_gives_up_when_a_grant_is_stuck() -> None:
    mover = nixl()
    side = Side(mover)
    peer = side.connect(side, side.extent(0))
    with mover._receiver._lock, pytest.raises(MoverError) as caught:
        mover.fence(peer, [side.extent(0)], time.monotonic() + 0.02)
    assert caught.value.code is ErrorCode.BUSY
    mover.close()


def test_who_runs_on_another_machine_cannot_write_directly() -> None:
    mover, elsewhere = create(transports="all"), nixl()
    side = Side(mover)
    description = wire.decode(elsewhere.describe([]))
    other_namespace = msgspec.structs.replace(description, host=bytes(16))
    other_machine = msgspec.structs.replace(other_namespace, machine=bytes(16))
    mover.fence(mover.connect(wire.encode(other_machine)), [side.extent(0)], time.monotonic() + 1)
    elsewhere.close()
    with pytest.raises(MoverError) as caught:  # it has ended, but that cannot be seen from here
        mover.fence(_fresh(mover, other_namespace), [side.extent(0)], time.monotonic())
    assert caught.value.code is ErrorCode.TRANSFER_TIMEOUT
    mover.close()


def _fresh(mover: NixlMover, description: wire.Description) -> Peer:
    return mover.connect(wire.encode(msgspec.structs.replace(description, incarnation=b"another mover 16")))


def test_a_gpu_that_is_reached_through_the_host_is_warned_of(make: MakeSide, caplog: pytest.LogCaptureFixture) -> None:
    writer, owner = make(), make()
    real = wire.decode(owner.mover.describe([owner.extent(0)]))
    parts = tuple(msgspec.structs.replace(part, cuda=True) for part in real.parts)
    with caplog.at_level(logging.WARNING, logger="pdhandoff.engines.nixl"):
        for _ in range(2):
            writer.mover.connect(wire.encode(msgspec.structs.replace(real, parts=parts)))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "tcp/lo" in caplog.text
    assert "cuda_ipc" in caplog.text


def test_memory_of_a_gpu_needs_torch(monkeypatch: pytest.MonkeyPatch, make: MakeSide) -> None:
    side = make()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MoverError, match="pip install torch") as caught:
        side.mover.allocate(PAGE, CUDA)
    assert caught.value.code is ErrorCode.CONFIG


@pytest.mark.parametrize("nbytes", [0, -1])
def test_nothing_cannot_be_allocated(make: MakeSide, nbytes: int) -> None:
    with pytest.raises(MoverError) as caught:
        make().mover.allocate(nbytes)
    assert caught.value.code is ErrorCode.OUT_OF_RANGE


def test_extents_may_cross_from_one_region_into_the_next(make: MakeSide) -> None:
    writer, owner = make(), make()
    owner.mover.deregister(owner.region)
    for first, pages in ((0, 3), (3, 5)):
        owner.mover.register(Memory(owner.address + first * PAGE, pages * PAGE))
    writer.fill(4)
    peer = writer.mover.connect(owner.mover.describe([Extent(owner.address, 8 * PAGE)]))
    assert writer.write(peer, (writer.address, owner.address, 8 * PAGE)).state is TransferState.DONE
    assert owner.bytes() == b"\4" * 8 * PAGE

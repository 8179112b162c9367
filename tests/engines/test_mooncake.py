"""The Mooncake mover in one process: options, what is missing, what peers are shown, and how writes are awaited."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from pdhandoff.engines.base import Extent, Memory, MemoryKind, TransferState, Writes
from pdhandoff.engines.mooncake import create, cuda, library, wire
from pdhandoff.engines.mooncake.engine import Engine, Outcome
from pdhandoff.engines.mooncake.library import LogLevel, Protocol, Settings
from pdhandoff.errors import ErrorCode, MoverError
from pdhandoff.ids import Incarnation
from support.child import ROOT
from support.mooncake_fixtures import MakeSide, make
from support.mooncake_fixtures import library as load_library
from support.movers import PAGE, Side, settle, soon
from support.transfer_engines import mooncake

__all__ = ["load_library", "make"]


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, since Mooncake's settings hold for a process."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path, **variables},
    )


# Options, and what is missing


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"protocol": "infiniband"}, "choose one of tcp, rdma, nvlink_intra"),
        ({"log_level": "loud"}, "choose one of info, warning, error, silent"),
        ({"lanes": 0}, "lanes is 0: choose 1 to 64"),
        ({"stall_s": 3601}, "stall_s is 3601"),
        ({"connect_s": -1}, "connect_s is -1"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(MoverError, match=sentence) as caught:
        create(**options)
    assert caught.value.code is ErrorCode.CONFIG


def test_other_settings_than_those_in_force_are_refused() -> None:
    with pytest.raises(MoverError, match="hold for a whole process") as caught:
        create(log_level="info")
    assert caught.value.code is ErrorCode.CONFIG


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no mover had been made in this process."""
    monkeypatch.setattr(library, "_applied", [])
    for name in tuple(os.environ):
        if name.startswith("MC_"):
            monkeypatch.delenv(name)


def _failing(monkeypatch: pytest.MonkeyPatch, error: ImportError) -> None:
    def fail(_: str) -> NoReturn:
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)


@pytest.mark.usefixtures("fresh")
def test_a_missing_wheel_is_one_sentence_with_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    _failing(monkeypatch, ModuleNotFoundError("No module named 'mooncake'"))
    with pytest.raises(MoverError, match=r"pip install 'pdhandoff\[mooncake\]'") as caught:
        create()
    assert caught.value.code is ErrorCode.CONFIG


@pytest.mark.usefixtures("fresh")
def test_a_missing_system_library_is_one_sentence_with_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    _failing(monkeypatch, ImportError("libibverbs.so.1: cannot open shared object file"))
    with pytest.raises(MoverError, match="apt-get install libibverbs1 librdmacm1 libnuma1 libcurl4") as caught:
        create()
    assert "libibverbs.so.1" in caught.value.reason


@pytest.mark.usefixtures("fresh")
def test_rdma_without_a_device_is_refused_instead_of_falling_back_to_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_HCAS", ROOT / "no such folder")
    with pytest.raises(MoverError, match="over TCP without saying so"):
        create(protocol="rdma")
    with pytest.raises(MoverError, match="mlx5_9"):
        create(protocol="rdma", devices=["mlx5_9"])


@pytest.mark.usefixtures("fresh")
def test_rdma_with_a_device_is_made_and_promises_less(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(library, "_HCAS", tmp_path)
    mover = create(protocol="rdma", devices=["mlx5_0"], log_level="error")
    assert not mover.capabilities.fence
    assert "MC_FORCE_TCP" not in os.environ
    mover.close()


@pytest.mark.usefixtures("fresh")
def test_nvlink_without_a_cuda_wheel_is_refused() -> None:
    if importlib.import_module("mooncake.engine").SUPPORT_INTRA_NVLINK:
        pytest.skip("this wheel has nvlink_intra")
    with pytest.raises(MoverError, match="mooncake-transfer-engine-cuda13"):
        create(protocol="nvlink_intra")
    assert "MC_INTRANODE_NVLINK" not in os.environ


@pytest.mark.usefixtures("fresh")
def test_settings_that_come_too_late_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    create(log_level="error").close()
    assert "imported before" in caplog.text


class _Driver:
    """NVIDIA's driver, as far as it is used, failing at one step."""

    def __init__(self, fails: str) -> None:
        self._fails = fails
        self.bound = False

    def cuInit(self, _: int) -> int:
        return 3 * (self._fails == "init")

    def cuDevicePrimaryCtxRetain(self, _: object, device: int) -> int:
        return 101 * (device != 0)

    def cuCtxSetCurrent(self, _: object) -> int:
        self.bound = True
        return 0


def test_a_thread_gets_a_context_before_gpu_memory_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver("nowhere")
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda _: driver)  # type: ignore[attr-defined]
    cuda.bind_thread(0)
    assert driver.bound


@pytest.mark.parametrize(("fails", "device", "sentence"), [("init", 0, "error 3"), ("", 7, "CUDA device 7 .* 101")])
def test_a_gpu_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, fails: str, device: int, sentence: str
) -> None:
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda _: _Driver(fails))  # type: ignore[attr-defined]
    with pytest.raises(MoverError, match=sentence) as caught:
        cuda.bind_thread(device)
    assert caught.value.code is ErrorCode.CONFIG


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> NoReturn:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda.ctypes, "CDLL", missing)  # type: ignore[attr-defined]
    with pytest.raises(MoverError, match=r"NVIDIA's driver.*libcuda\.so\.1"):
        cuda.bind_thread(0)


def test_settings_become_the_variables_that_mooncake_reads() -> None:
    settings = Settings(
        protocol=Protocol.NVLINK_INTRA, ipv6=True, lanes=3, stall_s=7, connect_s=2, log_level=LogLevel.WARNING
    )
    assert settings.environment() == {
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        "MC_TCP_LANES_PER_PEER": "3",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": "7",
        "MC_TCP_STATUS_TIMEOUT_SEC": "7",
        "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
        "MC_INTRANODE_NVLINK": "1",
        "MC_USE_IPV6": "1",
        "MC_LOG_LEVEL": "WARNING",
    }
    assert msgspec.structs.replace(settings, protocol=Protocol.TCP).environment()["MC_FORCE_TCP"] == "1"


def test_importing_the_mover_loads_neither_mooncake_nor_a_tensor_library() -> None:
    program = (
        "import sys, pdhandoff.engines.mooncake; sys.exit(bool({'mooncake', 'torch', 'numpy'} & set(sys.modules)))"
    )
    assert run(program).returncode == 0


_ROUND_TRIP = """
from pdhandoff.engines.mooncake import create
from support.movers import Side
writer, owner = (Side(create(host={host!r}, log_level={level!r})) for _ in range(2))
writer.fill(3)
peer = writer.connect(owner, owner.extent(0))
print(writer.write(peer, (writer.address, owner.address, 100)).state.value, owner.bytes(0, 100) == bytes((3,)) * 100)
owner.mover.fence(peer, [owner.extent(0)], 1e12)
print(writer.write(peer, (writer.address, owner.address, 100)).state.value)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("level", "silent"), [("silent", True), ("error", False)])
def test_mooncake_is_as_quiet_as_it_was_told_to_be(level: str, silent: bool) -> None:
    done = run(_ROUND_TRIP.format(host="127.0.0.1", level=level))
    assert done.stdout.split() == ["done", "True", "failed"]
    assert (not done.stderr) is silent


@pytest.mark.slow
def test_a_process_can_speak_ipv6() -> None:
    done = run(_ROUND_TRIP.format(host="::1", level="silent"))
    assert done.stdout.split() == ["done", "True", "failed"], done.stderr


@pytest.mark.slow
def test_an_address_of_another_host_fails_and_says_so() -> None:
    program = (
        "from pdhandoff.engines.mooncake import create\nfrom support.movers import Side\n"
        "side = Side(create(host='no-such-host.invalid', log_level='silent'))\n"
        "status = side.write(side.connect(side, side.extent(0)), (side.address, side.address + 64, 8))\n"
        "print(status.state.value, status.quiet, status.reason)"
    )
    done = run(program)
    assert done.stdout.startswith("failed True no-such-host.invalid"), done.stdout + done.stderr


# Memory and grants


def test_memory_of_a_gpu_is_refused_where_the_wheel_cannot_move_it(make: MakeSide) -> None:
    side = make()
    for call in (
        lambda: side.mover.allocate(8, MemoryKind.CUDA),
        lambda: side.mover.register(Memory(4096, 8, MemoryKind.CUDA)),
    ):
        with pytest.raises(MoverError) as caught:
            call()
        assert caught.value.code is ErrorCode.CONFIG


@pytest.mark.parametrize("memory", [Memory(0, 8), Memory(4096, 0), Memory(4096, -1)])
def test_a_range_that_is_none_cannot_be_registered(make: MakeSide, memory: Memory) -> None:
    with pytest.raises(MoverError) as caught:
        make().mover.register(memory)
    assert caught.value.code is ErrorCode.OUT_OF_RANGE


@pytest.mark.parametrize(("start", "length"), [(0, 0), (0, -1), (-1, 2), (8 * PAGE - 1, 2), (1 << 45, 1)])
def test_only_extents_of_one_region_can_be_granted_or_fenced(make: MakeSide, start: int, length: int) -> None:
    side = make()
    extent = Extent(side.address + start, length)
    me = side.connect(side)
    for call in (lambda: side.mover.describe([extent]), lambda: side.mover.fence(me, [extent], soon())):
        with pytest.raises(MoverError) as caught:
            call()
        assert caught.value.code is ErrorCode.OUT_OF_RANGE


def test_memory_that_overlaps_shown_memory_in_part_cannot_be_shown(make: MakeSide) -> None:
    side = make()
    mover = mooncake()
    halves = [Memory(side.address, 2 * PAGE), Memory(side.address + PAGE, 2 * PAGE)]
    for half in halves:
        mover.register(half)
    mover.describe([Extent(side.address, PAGE)])
    with pytest.raises(MoverError, match="overlap") as caught:
        mover.describe([Extent(side.address + 2 * PAGE, PAGE)])
    assert caught.value.code is ErrorCode.MOVER_FAILED
    mover.close()


def test_memory_that_two_regions_share_is_hidden_with_the_last_of_them(make: MakeSide) -> None:
    writer, owner = make(), make()
    second = owner.mover.register(owner.memory._replace(length=4 * PAGE))
    peer = writer.connect(owner, owner.extent(0))
    owner.mover.describe([Extent(owner.address, 2 * PAGE)])
    owner.mover.deregister(owner.region)
    peer = writer.connect(owner, owner.extent(0))
    assert writer.write(peer, (writer.address, owner.address, 8)).state is TransferState.DONE
    owner.mover.deregister(second)
    assert writer.write(peer, (writer.address, owner.address, 8)).state is TransferState.FAILED


def _raw_write(peer_segment: str, source: int, destination: int) -> Outcome:
    """What a writer gets that checks nothing."""
    settings = library._applied[0]
    engine = Engine(settings, host="127.0.0.1", devices=())
    try:
        handle = engine.write(peer_segment, source, destination, 8)
        if handle is None:
            return Outcome.FAILED
        while (outcome := engine.check(handle)) is Outcome.PENDING:
            threading.Event().wait(0.001)
        return outcome
    finally:
        engine.close()


def test_what_is_only_a_source_is_not_shown_and_what_is_granted_from_is_shown_whole(make: MakeSide) -> None:
    owner, rogue = make(), make()
    other = owner.mover.allocate(PAGE)
    owner.mover.register(other)
    segment = wire.decode(owner.mover.describe([owner.extent(1)])).segment
    rogue.fill(6)
    assert _raw_write(segment, rogue.address, other.address) is Outcome.FAILED
    assert not any(bytes(other.owner))
    # the limit of Mooncake: the granted page's whole region is open, so the writer's own check is what holds it back
    assert _raw_write(segment, rogue.address, owner.address + 5 * PAGE) is Outcome.DONE


def test_two_lives_at_one_address_are_two_peers(make: MakeSide) -> None:
    writer, owner = make(), make()
    writer.fill(2)
    description = wire.decode(owner.mover.describe([owner.extent(0)]))
    old = writer.mover.connect(wire.encode(description))
    assert writer.write(old, (writer.address, owner.address, 8)).state is TransferState.DONE
    successor = msgspec.structs.replace(description, incarnation=bytes(Incarnation.mint()))
    new = writer.mover.connect(wire.encode(successor))
    assert new.key != old.key
    assert writer.write(new, (writer.address, owner.address + 8, 8)).state is TransferState.DONE
    status = writer.write(old, (writer.address, owner.address + 16, 8))
    assert (status.state, status.quiet) == (TransferState.FAILED, True)
    assert owner.bytes(0, 24) == b"\2" * 16 + bytes(8)


def test_peers_with_another_protocol_or_another_host_are_refused(make: MakeSide) -> None:
    writer, owner = make(), make()
    description = wire.decode(owner.mover.describe([owner.extent(0)]))
    for change, code in (
        ({"protocol": Protocol.RDMA}, ErrorCode.MOVER_MISMATCH),
        ({"segment": "192.0.2.1:1234"}, ErrorCode.NOT_ALLOWED),
        ({"segment": "[::1]:1234"}, ErrorCode.NOT_ALLOWED),
    ):
        with pytest.raises(MoverError) as caught:
            writer.mover.connect(wire.encode(msgspec.structs.replace(description, **change)))
        assert caught.value.code is code


def test_a_fence_of_what_nobody_was_shown_starts_no_engine(make: MakeSide) -> None:
    owner = make()
    before = threading.active_count()
    owner.mover.fence(owner.connect(owner), [owner.extent(0)], soon())
    assert threading.active_count() == before


def test_a_fence_that_gets_no_turn_before_its_deadline_says_so(make: MakeSide) -> None:
    owner = make()
    me = owner.connect(owner)
    receiver = owner.mover._receiver  # type: ignore[attr-defined]
    with receiver._lock, pytest.raises(MoverError, match="nothing is fenced") as caught:
        owner.mover.fence(me, [owner.extent(0)], 0.0)
    assert caught.value.code is ErrorCode.MOVER_FAILED


def _engine_threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - only counted


def test_close_ends_all_threads_of_engines_and_peers(make: MakeSide) -> None:
    before = _engine_threads()
    writer, owner = make(), make()
    peer = writer.connect(owner, owner.extent(0))
    assert writer.write(peer, (writer.address, owner.address, 8)).state is TransferState.DONE
    assert _engine_threads() > before
    writer.mover.close()
    owner.mover.close()
    assert _engine_threads() <= before


def test_memory_that_peers_were_shown_outlives_its_owner(make: MakeSide) -> None:
    writer, owner = make(), make()
    memory = owner.mover.allocate(PAGE)
    region = owner.mover.register(memory)
    peer = writer.mover.connect(owner.mover.describe([Extent(memory.address, PAGE)]))
    address = memory.address
    owner.mover.deregister(region)
    del memory, region
    status = settle(writer.mover, writer.mover.submit(peer, Writes.of((writer.address, address, PAGE))))
    assert status.state is TransferState.FAILED
    with open("/proc/self/maps", encoding="utf-8") as maps:  # noqa: PTH123 - a file that is no file
        ranges = [line.split()[0].split("-") for line in maps]
    assert any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def test_a_side_may_write_to_itself(make: MakeSide) -> None:
    side: Side = make()
    side.fill(9, 0, PAGE)
    peer = side.connect(side, side.extent(4))
    assert side.write(peer, (side.address, side.address + 4 * PAGE, PAGE)).state is TransferState.DONE
    assert side.bytes(4 * PAGE, PAGE) == b"\11" * PAGE

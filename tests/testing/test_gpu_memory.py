"""The kit in GPU memory: what can be seen without a GPU, and a run on memory that only says that it is one's."""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys

import pytest

from pdhandoff.cli import main
from pdhandoff.engines.base import Memory, MemoryKind
from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.testing import Sizes, Verdict, gpu, run_conformance
from pdhandoff.testing.bytes_at import callers_memory, fill_bytes, put_bytes, read_bytes
from pdhandoff.testing.place import IN_CPU_MEMORY, Place

RULES = ["M-01", "M-03", "M-05", "M-07", "M-12", "M-13", "M-16", "M-26", "M-30"]


def library(**how: str) -> object:
    from testing.pretend_gpu import Library

    return Library(**how)


@pytest.fixture
def real_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the pretended GPU replaces comes back after the test."""
    monkeypatch.setattr(gpu, "driver", gpu.driver)


@pytest.mark.skipif(not gpu.no_gpu(0), reason="there is a GPU")
def test_without_a_gpu_every_rule_is_skipped_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--mover", "nixl", "--memory", "cuda", "--json", "--rule", "M-12"]) == 1
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["verdict"] == "skip"
    assert result["reason"] == gpu.no_gpu(0) or "does not claim cuda memory" in result["reason"]


@pytest.mark.slow
def test_a_mover_without_gpu_memory_is_not_asked() -> None:
    report = run_conformance("loopback", memory=MemoryKind.CUDA)
    assert {result.reason for result in report.of(Verdict.SKIP)} == {"the mover does not claim cuda memory"}
    assert not report.ok


@pytest.mark.slow
@pytest.mark.usefixtures("real_driver")
def test_all_memory_of_a_run_is_where_it_should_be() -> None:
    from testing import pretend_gpu

    pretend_gpu.install()
    sizes = Sizes(large_bytes=2 << 20, storm_bytes=1 << 20, late_s=0.3)
    report = run_conformance(pretend_gpu.make, rules=RULES, memory=MemoryKind.CUDA, device=1, sizes=sizes)
    assert {result.rule: result.reason for result in report.of(Verdict.FAIL)} == {}
    assert [result.rule for result in report.of(Verdict.PASS)] == RULES


def test_the_driver_moves_bytes() -> None:
    fake = library()
    driver = gpu.Driver(fake, 1)
    block = driver.allocate(64)
    assert driver.read(block.address, 64) == bytes(64)
    driver.fill(block.address + 1, 7, 2)
    driver.put(block.address + 3, b"abc")
    assert driver.read(block.address, 7) == b"\0\7\7abc\0"
    del block
    gc.collect()
    assert fake.blocks == {}, "it is freed with its object"  # type: ignore[attr-defined]
    calls = fake.calls  # type: ignore[attr-defined]
    assert calls[:3] == ["cuInit", "cuDeviceGetCount", "cuDevicePrimaryCtxRetain"]
    changes = [number for number, name in enumerate(calls) if name in {"cuMemsetD8_v2", "cuMemcpyHtoD_v2"}]
    assert {calls[number + 1] for number in changes} == {"cuCtxSynchronize"}, "others see it when the call returns"
    assert {calls[number - 1] for number in changes} <= {"cuCtxSetCurrent"}


def test_a_device_that_there_is_not_and_a_call_that_fails_are_named() -> None:
    with pytest.raises(LocalError, match="there is no CUDA device 2: the driver sees 2") as caught:
        gpu.Driver(library(), 2)
    assert caught.value.code is ErrorCode.CONFIG
    with pytest.raises(LocalError, match="CUDA device 0 cannot be used: cuInit gave error 201"):
        gpu.Driver(library(broken="cuInit"), 0)


@pytest.mark.skipif(not gpu.no_gpu(0), reason="there is a GPU")
def test_a_machine_without_a_driver_says_so() -> None:
    assert gpu.no_gpu(0)
    with pytest.raises(LocalError) as caught:
        gpu.driver(0)
    assert caught.value.reason == gpu.no_gpu(0)


def test_memory_of_the_caller_is_aligned() -> None:
    memory = callers_memory(IN_CPU_MEMORY, 100, 4096)
    assert memory.address % 4096 == 0
    put_bytes(memory, 0, b"ab")
    fill_bytes(memory, 7, 2, 98)
    assert read_bytes(memory, 0, 100) == b"ab" + b"\7" * 98


@pytest.mark.usefixtures("real_driver")
def test_bytes_of_gpu_memory_go_through_the_driver() -> None:
    from testing import pretend_gpu

    pretend_gpu.install()
    memory = callers_memory(Place(MemoryKind.CUDA, 1), 100, 4096)
    assert (memory.kind, memory.device, memory.address % 4096) == (MemoryKind.CUDA, 1, 0)
    put_bytes(memory, 0, b"ab")
    fill_bytes(memory, 7, 2, 98)
    assert read_bytes(memory, 0, 100) == ctypes.string_at(memory.address, 100) == b"ab" + b"\7" * 98
    assert isinstance(memory, Memory)


def test_a_place_is_spelt_and_read() -> None:
    for place in (IN_CPU_MEMORY, Place(MemoryKind.CUDA, 3)):
        assert Place.parse(place.spell()) == place


@pytest.mark.slow
def test_the_kit_imports_no_gpu_code_for_cpu_memory() -> None:
    script = (
        "import sys, pdhandoff.testing.runner, pdhandoff.testing.peer; print('pdhandoff.testing.gpu' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"

"""What every test run shares: one thread per process, and honesty about what did not run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("same examples in every run", derandomize=True)
settings.load_profile("same examples in every run")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch

_NVIDIA = Path("/proc/driver/nvidia/gpus")


def _has_gpu() -> bool:
    return _NVIDIA.is_dir() and any(_NVIDIA.iterdir())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not _has_gpu():
        skip = pytest.mark.skip(reason="gpu: no CUDA device here")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("passed"):
        for name, line in report.user_properties:
            if name == "explored" and report.when == "call":
                terminalreporter.write_line(f"explored: {line}")
    if not any("gpu" in report.keywords for report in terminalreporter.getreports("passed")):
        terminalreporter.write_line("suites that did not run: gpu" + ("" if _has_gpu() else " (no CUDA device here)"))

"""Which implementation an endpoint computes with."""

from __future__ import annotations

import pytest

from pdhandoff.engines.base import MemoryKind
from pdhandoff.errors import LocalError
from pdhandoff.native.base import Native
from pdhandoff.runtime import natives


def test_the_variable_chooses_in_cpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDHANDOFF_NATIVE", "reference")
    assert natives.native_for(MemoryKind.CPU).name == "reference"


def test_kernels_that_do_not_reach_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnDevice:
        name = "cuda"

    def loaded(_: str | None = None) -> Native:
        return OnDevice()  # type: ignore[return-value]

    monkeypatch.setattr(natives, "load", loaded)
    with pytest.raises(LocalError, match="PDHANDOFF_NATIVE=cuda"):
        natives.native_for(MemoryKind.CPU)

"""What the runtime tells whoever watches it. `observe.trace.Recorder` is one."""

from __future__ import annotations

from typing import Protocol

from pdhandoff.observe.trace import Value

__all__ = ["Observer"]


class Observer(Protocol):
    """Takes spans and instants from the runtime's threads. Must return at once and must not raise."""

    def add(self, name: str, track: str, start_ns: int, end_ns: int, **args: Value) -> None:
        """Something took from `start_ns` to `end_ns`, monotonic."""

    def instant(self, name: str, track: str, **args: Value) -> None:
        """Something happens now."""

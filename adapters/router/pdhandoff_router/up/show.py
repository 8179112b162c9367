"""Tells a person how the start goes: a live table on a terminal, a line per change elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self, final

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from pdhandoff_router.up.processes import Process

__all__ = ["Show"]

_LINE = 60


@final
class Show:
    """A context manager; while it is entered, `update` may be called often.

    Args:
        console: where to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stack = ExitStack()
        self._live: Live | None = None
        self._spinner = Spinner("dots")
        self._said: set[tuple[str, bool]] = set()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = self._stack.enter_context(
                Live(console=self._console, refresh_per_second=8, transient=True, redirect_stderr=False)
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def update(self, processes: Sequence[Process], now: float) -> None:
        """Show how far each is.

        Args:
            processes: all of them.
            now: seconds, monotonic.
        """
        for process in processes:
            ready = process.ready_s is not None
            if (process.part.name, ready) not in self._said and (ready or self._live is None):
                self._said.add((process.part.name, ready))
                self._console.print(_line(process), highlight=False, soft_wrap=True)
        if self._live is not None:
            self._live.update(self._table([each for each in processes if each.ready_s is None], now))

    def _table(self, processes: Sequence[Process], now: float) -> Table:
        table = Table.grid(padding=(0, 1))
        for process in processes:
            words = process.tail(1).strip()
            table.add_row(
                self._spinner,
                f"{process.part.name:<9}",
                f"{now - process.began:4.0f} s",
                Text(words[:_LINE] + ("…" if len(words) > _LINE else ""), style="dim", no_wrap=True),
            )
        return table


def _line(process: Process) -> str:
    name, about = f"{process.part.name:<9}", f"{process.part.about:<20}"
    if process.ready_s is None:
        return f"  {name} {about} starts; its log is {escape(str(process.log))}"
    return f"[green]✓[/] {name} {about} ready after {process.ready_s:.0f} s  [dim]{process.part.url}[/]"

"""Subcommands that other installed packages bring.

A package declares one in the entry-point group `pdhandoff.commands`: the subcommand's name, and a function as
`pdhandoff.cli.demo:add_parser` is one. It should import nothing heavy before its subcommand runs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable, Iterable
from typing import Final

from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["GROUP", "add_installed"]

GROUP: Final = "pdhandoff.commands"
"the entry-point group"

_Commands = argparse._SubParsersAction  # noqa: SLF001 - argparse has no other name for what `add_subparsers` returns


def add_installed(
    commands: _Commands[argparse.ArgumentParser], entries: Iterable[importlib.metadata.EntryPoint] | None = None
) -> None:
    """Declare every installed subcommand.

    One that cannot be loaded is listed too, with the reason, and fails when it is run. A name that is taken is left
    out: no package replaces a subcommand of the library.

    Args:
        commands: where to declare them.
        entries: those to declare. Default: what installed packages declare.
    """
    found = importlib.metadata.entry_points(group=GROUP) if entries is None else entries
    for entry in sorted(found, key=lambda each: each.name):
        if entry.name in commands.choices:
            continue
        problem = _declare(entry, commands)
        if problem and entry.name not in commands.choices:
            # without a prefix, options too are plain words: whatever was asked of it, the reason is shown
            about = f"cannot be loaded: {problem}".replace("%", "%%")
            broken = commands.add_parser(entry.name, help=about, add_help=False, prefix_chars="\0")
            broken.add_argument("words", nargs="*", help=argparse.SUPPRESS)
            broken.set_defaults(run=_refuse(entry, problem))


def _declare(entry: importlib.metadata.EntryPoint, commands: _Commands[argparse.ArgumentParser]) -> str:
    """What keeps a subcommand from being declared; empty: nothing."""
    try:
        entry.load()(commands)
    except Exception as error:  # noqa: BLE001 - another package's code: its fault may not take the others with it
        return " ".join(f"{type(error).__name__}: {error}".split())
    if entry.name not in commands.choices:
        return f"{entry.value} declares no subcommand of this name"
    return ""


def _refuse(entry: importlib.metadata.EntryPoint, problem: str) -> Callable[[argparse.Namespace], int]:
    def run(_options: argparse.Namespace) -> int:
        raise LocalError(
            ErrorCode.CONFIG,
            f"the subcommand {entry.name!r} ({entry.value}) cannot be loaded: {problem}. Install what it needs",
        )

    return run

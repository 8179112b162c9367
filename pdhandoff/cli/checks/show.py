"""Findings for people: a table where rich is installed, lines of text where it is not."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TextIO

from pdhandoff.cli.checks.finding import Check, Finding, Status

__all__ = ["collect", "print_findings"]

_STYLES: Final = {
    Status.OK: "green",
    Status.WARNING: "yellow",
    Status.PROBLEM: "bold red",
    Status.SKIPPED: "dim",
}


def _has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def collect(checks: Sequence[Check]) -> list[Finding]:
    """Run them all, showing on standard error which one is running."""
    found: list[Finding] = []
    for number, check in enumerate(checks, start=1):
        with _shown(f"{check.title} ({number} of {len(checks)})"):
            found += check.run()
    return found


@contextmanager
def _shown(text: str) -> Iterator[None]:
    """Show what is going on, where a person looks."""
    if not sys.stderr.isatty():
        yield
    elif not _has_rich():
        print(f"- {text}", file=sys.stderr, flush=True)
        yield
    else:
        from rich.console import Console

        with Console(stderr=True).status(text):
            yield


def print_findings(findings: Sequence[Finding], out: TextIO) -> None:
    """All of them, in order, and a line that sums up."""
    if _has_rich():
        _table(findings, out)
    else:
        for finding in findings:
            print(f"{finding.status.value:8} {finding.check}: {_text(finding)}", file=out)
    print(_sum(findings), file=out)


def _text(finding: Finding) -> str:
    lines = [finding.says]
    if finding.advice:
        lines.append(finding.advice)
    if finding.command:
        lines.append(f"$ {finding.command}")
    return "\n    ".join(lines)


def _table(findings: Sequence[Finding], out: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("", "check", "finding"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        style = _STYLES[finding.status]
        text = Text(finding.says)
        if finding.advice:
            text.append(f"\n{finding.advice}", style="dim")
        if finding.command:
            text.append(f"\n$ {finding.command}", style="cyan")
        table.add_row(Text(finding.status.value, style=style), Text(finding.check), text)
    Console(file=out, highlight=False).print(table)


def _sum(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.status for finding in findings)
    if counts[Status.PROBLEM]:
        verdict = "not ready"
    elif counts[Status.WARNING]:
        verdict = "ready, with warnings"
    else:
        verdict = "ready"
    numbers = ", ".join(f"{counts[status]} {status.value}" for status in Status if counts[status])
    return f"{verdict}: {numbers}"

"""Rules and results of the conformance kit, as tables and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from rich.console import Console

    from pdhandoff.testing import Report, Result, Rule

__all__ = ["Progress", "print_json", "print_rules"]


def print_json(value: object) -> None:
    """On standard output."""
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


def print_rules(rules: Sequence[Rule], *, as_json: bool) -> None:
    """Every rule with what it is asked of."""
    if as_json:
        print_json(
            [
                {"rule": rule.number, "title": rule.title, "must": rule.must, "need": rule.need, "asks": rule.asks}
                for rule in rules
            ]
        )
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("rule", "what", "only with", show_edge=False)
    for rule in rules:
        table.add_row(rule.number, rule.must, rule.need.capability if rule.need else rule.asks)
    Console(highlight=False).print(table)


@final
class Progress:
    """A line for each rule as it ends, and a table of all in the end."""

    def __init__(self, *, quiet: bool) -> None:
        self._console: Console | None = None
        if not quiet:
            from rich.console import Console

            self._console = Console(highlight=False)

    def result(self, result: Result) -> None:
        """One rule has ended."""
        if self._console is not None and self._console.is_terminal:
            self._console.print(f"[dim]- {result.rule} {result.title}: {result.verdict.value}[/]")

    def end(self, report: Report) -> None:
        """The table."""
        if self._console is None:
            return
        from rich.markup import escape
        from rich.table import Table

        from pdhandoff.testing import Verdict

        colours = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.SKIP: "yellow"}
        title = f"{escape(report.subject)} against the rules of {report.rules}"
        table = Table("rule", "", "s", "what", title=title, show_edge=False)
        for result in report.results:
            words = result.must if result.verdict is Verdict.PASS else f"{result.must}\n-> {result.reason}"
            verdict = f"[{colours[result.verdict]}]{result.verdict.name}[/]"
            table.add_row(result.rule, verdict, f"{result.elapsed_s:.1f}", escape(words))
        self._console.print(table)
        for result in report.of(Verdict.FAIL):
            if result.detail:
                self._console.print(f"\n{result.rule}, the last lines on standard error:\n{escape(result.detail)}")
        counts = ", ".join(f"{len(report.of(verdict))} {verdict.value}" for verdict in Verdict)
        self._console.print(f"\n{escape(report.subject)}: {counts}")

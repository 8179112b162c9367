"""`pdhandoff conformance`: check a mover against the numbered rules."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pdhandoff.cli.options import mover_option
from pdhandoff.errors import ErrorCode, LocalError

if TYPE_CHECKING:
    from rich.console import Console

    from pdhandoff.testing import Report, Result, Sizes

__all__ = ["add_parser"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "conformance",
        help="check a mover (transfer engine) against the numbered rules",
        description="Checks a mover between processes of this machine, in CPU memory: what it promises must hold, and "
        "what it does not promise is listed as skipped. Exit status 0: something passed and nothing failed.",
    )
    parser.add_argument("--mover", metavar="NAME", help="a registered mover, or module:factory")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=mover_option,
        metavar="KEY=VALUE",
        help="an option of the mover, as JSON where it is JSON and as text otherwise; may be repeated",
    )
    parser.add_argument(
        "--rule", action="append", default=[], metavar="M-07", help="check this rule only; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="print the rules and check nothing")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write the results there as JUnit XML")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, and nothing else")
    sizes = parser.add_argument_group("sizes and patience")
    sizes.add_argument("--large-bytes", type=_positive, metavar="N", help="bytes of the one large write (64 MiB)")
    sizes.add_argument("--descriptors", type=_positive, metavar="N", help="writes of the one large batch (100000)")
    sizes.add_argument("--threads", type=_positive, metavar="N", help="writers at the same time (8)")
    sizes.add_argument("--death-s", type=float, metavar="S", help="in which a dead peer must be noticed (10)")
    sizes.add_argument("--leaked-threads", type=int, metavar="N", help="that each closed mover may leave behind (0)")
    sizes.add_argument(
        "--leaked-descriptors", type=int, metavar="N", help="that each closed mover may leave behind (0)"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if not options.json and importlib.util.find_spec("rich") is None:
        raise LocalError(ErrorCode.CONFIG, "the table needs rich: pip install rich, or ask for --json")
    from pdhandoff.testing.runner import choose, run_conformance

    if options.list:
        _print_rules(options.rule, as_json=options.json)
        return 0
    if options.mover is None:
        from pdhandoff.engines.registry import known

        raise LocalError(
            ErrorCode.CONFIG, f"--mover says what to check: {', '.join(known())}, or module:factory of your own"
        )
    choose(options.rule)
    show = _Progress(quiet=options.json)
    report = run_conformance(
        options.mover,
        rules=options.rule,
        options=dict(options.option),
        sizes=_sizes(options),
        on_result=show.result,
    )
    if options.junit is not None:
        options.junit.write_bytes(report.to_junit())
    if options.json:
        _print_json(report)
    else:
        show.end(report)
    return 0 if report.ok else 1


def _sizes(options: argparse.Namespace) -> Sizes:
    from pdhandoff.testing import Sizes

    given = {name: getattr(options, name) for name in Sizes.__struct_fields__ if hasattr(options, name)}
    return Sizes(**{name: value for name, value in given.items() if value is not None})


def _print_json(value: object) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


def _print_rules(numbers: list[str], *, as_json: bool) -> None:
    from pdhandoff.testing.runner import choose

    rules = choose(numbers)
    if as_json:
        _print_json(
            [{"rule": rule.number, "title": rule.title, "must": rule.must, "need": rule.need} for rule in rules]
        )
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("rule", "what", "only with", show_edge=False)
    for rule in rules:
        table.add_row(rule.number, rule.must, rule.need.capability if rule.need else "")
    Console(highlight=False).print(table)


class _Progress:
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
        table = Table("rule", "", "s", "what", title=f"{report.mover} against the rules of movers", show_edge=False)
        for result in report.results:
            words = result.must if result.verdict is Verdict.PASS else f"{result.must}\n-> {result.reason}"
            verdict = f"[{colours[result.verdict]}]{result.verdict.name}[/]"
            table.add_row(result.rule, verdict, f"{result.elapsed_s:.1f}", escape(words))
        self._console.print(table)
        for result in report.of(Verdict.FAIL):
            if result.detail:
                self._console.print(f"\n{result.rule}, the last lines on standard error:\n{escape(result.detail)}")
        counts = ", ".join(f"{len(report.of(verdict))} {verdict.value}" for verdict in Verdict)
        self._console.print(f"\n{report.mover}: {counts}")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number

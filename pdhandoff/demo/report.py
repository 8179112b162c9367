"""The demo's table, picture and trace."""

from __future__ import annotations

from pathlib import Path
from typing import final

import msgspec
from rich.console import Console
from rich.table import Table

from pdhandoff.demo.run import DemoResult, RequestResult
from pdhandoff.errors import ErrorCode
from pdhandoff.observe.handoffs import group_by_handoff, handoff_times
from pdhandoff.observe.timeline import draw_timeline
from pdhandoff.observe.trace import write_trace

__all__ = ["DemoReport", "RequestReport", "make_report", "print_report", "write_pictures"]

DRAFTS = 3


@final
class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table."""

    request: int
    handoff: str
    prompt_tokens: int
    chunks: int
    bytes_moved: int
    exposed_ms: float | None
    "from the end of prefill until decode might start, the time the decode engine was busy not counted"
    drafts_accepted_first_step: int | None
    "of 3"
    cold_drafts_accepted_first_step: int | None
    "of 3, in a second run of the same prompt without the draft layer's rows"
    steps: int | None
    "verify steps for all tokens"
    cold_steps: int | None
    identical: bool | None
    "None: refused"
    refused: str | None
    "name of the error code"
    reason: str


@final
class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    ok: bool
    why: str
    requests: tuple[RequestReport, ...]
    killed: str | None
    interrupted: int
    held_after: dict[str, int]
    native: str
    "what converted the rows"
    timeline: str | None
    trace: str | None


def make_report(result: DemoResult, *, timeline: Path | None, trace: Path | None) -> DemoReport:
    """Sum the result up, with times from the recordings."""
    groups = group_by_handoff(result.recordings)
    exposed = {label: handoff_times(label, events).exposed_ns for label, events in groups.items()}
    return DemoReport(
        ok=result.ok,
        why=result.why,
        requests=tuple(_request(each, exposed.get(each.handoff[:8])) for each in result.requests),
        killed=result.killed,
        interrupted=result.interrupted,
        held_after=result.held_after,
        native=result.native,
        timeline=None if timeline is None else str(timeline),
        trace=None if trace is None else str(trace),
    )


def write_pictures(result: DemoResult, out: Path) -> tuple[Path, Path]:
    """The timeline (PNG) and the trace (JSON for Perfetto). Returns both paths."""
    timeline, trace = out / "timeline.png", out / "trace.json"
    draw_timeline(result.recordings, timeline, title="Prefill in one process, decode in another")
    write_trace(result.recordings, trace)
    return timeline, trace


def print_report(report: DemoReport, console: Console) -> None:
    """The table and a sentence."""
    table = Table(title="Handoffs, prefill process to decode process")
    for column in ("request", "prompt", "moved", "exposed", "drafts", "steps", "tokens"):
        table.add_column(column, justify="left" if column == "tokens" else "right")
    for line in report.requests:
        table.add_row(
            f"{line.request} ({line.handoff[:8]})",
            f"{line.prompt_tokens} in {line.chunks}",
            f"{line.bytes_moved / 1e6:.2f} MB",
            "-" if line.exposed_ms is None or line.refused else f"{line.exposed_ms:.1f} ms",
            _warm_and_cold(line.drafts_accepted_first_step, line.cold_drafts_accepted_first_step),
            _warm_and_cold(line.steps, line.cold_steps),
            _verdict(line),
        )
    console.print(table)
    console.print(
        "[dim]prompt: tokens, in chunks. exposed: from the end of prefill until decode might start. "
        f"drafts: accepted of the {DRAFTS} in the first verify step; steps: verify steps for all tokens; "
        "each with the draft layer's rows handed off, and (in brackets) in a second run without them. "
        f"Rows were converted by: {report.native}.[/]"
    )
    if report.killed is not None:
        console.print(
            f"Before that the {report.killed} was killed: {report.interrupted} handoffs ended there with a reason, "
            "none with a token."
        )
    console.print(f"[{'green' if report.ok else 'red'}]{'OK' if report.ok else 'FAILED'}[/]: {report.why}.")
    if report.timeline is not None:
        console.print(
            f"Picture: {report.timeline}   Trace (load it at ui.perfetto.dev): {report.trace}", soft_wrap=True
        )


def _request(result: RequestResult, exposed_ns: int | None) -> RequestReport:
    cold = result.cold
    return RequestReport(
        request=result.number,
        handoff=result.handoff,
        prompt_tokens=result.prompt_tokens,
        chunks=result.chunks,
        bytes_moved=result.nbytes,
        exposed_ms=None if exposed_ns is None else exposed_ns / 1e6,
        drafts_accepted_first_step=None if result.code else result.drafts_accepted_first_step,
        cold_drafts_accepted_first_step=None if cold is None else cold.drafts_accepted_first_step,
        steps=None if result.code else result.steps,
        cold_steps=None if cold is None else cold.steps,
        identical=result.identical,
        refused=_code_name(result.code) if result.code else None,
        reason=result.reason,
    )


def _warm_and_cold(warm: int | None, cold: int | None) -> str:
    if warm is None:
        return "-"
    return f"{warm}" if cold is None else f"{warm} ({cold})"


def _code_name(code: int) -> str:
    return ErrorCode(code).name if code in set(ErrorCode) else str(code)


def _verdict(line: RequestReport) -> str:
    if line.refused is not None:
        return f"[yellow]refused: {line.refused}[/]"
    return "[green]identical[/]" if line.identical else "[red]NOT identical[/]"

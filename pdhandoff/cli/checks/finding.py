"""What a check has found, and all findings of a run. The JSON form is stable: fields are added, never changed."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Self, final

import msgspec

import pdhandoff

__all__ = ["SCHEMA", "Check", "Fact", "Finding", "Report", "Status"]

SCHEMA: Final = 1
"raised when a field changes its meaning or goes away"

Fact = str | int | float | bool | tuple[str, ...] | None


@final
class Status(enum.Enum):
    """How much a finding matters."""

    OK = "OK"
    WARNING = "WARNING"
    "works, but not everything, or not everywhere"
    PROBLEM = "PROBLEM"
    "handoffs would fail"
    SKIPPED = "SKIPPED"
    "was not looked at, and why"


@final
class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence about one thing, and what to do about it."""

    check: str
    "what was looked at, for scripts: `mover.nixl.write.cpu`"
    status: Status
    says: str
    advice: str = ""
    "what to do, or what it means"
    command: str = ""
    "that does it, or shows more; empty when there is none"
    facts: Mapping[str, Fact] = {}
    "what the sentence was made from; times in seconds, sizes in bytes"


class Check(NamedTuple):
    """A part of the run."""

    title: str
    "shown while it runs"
    run: Callable[[], Iterable[Finding]]


@final
class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    schema: int = SCHEMA
    pdhandoff: str = pdhandoff.__version__
    ok: bool
    "whether there is no PROBLEM"
    counts: Mapping[str, int]
    "findings by status; every status is there"
    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, findings: Sequence[Finding]) -> Self:
        """All findings of a run, in order."""
        counts = {status.value: sum(finding.status is status for finding in findings) for status in Status}
        return cls(ok=not counts[Status.PROBLEM.value], counts=counts, findings=tuple(findings))

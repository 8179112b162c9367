"""What a run of the kit found: for people, for programs, and for continuous integration."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import final
from xml.etree import ElementTree as ET

import msgspec

__all__ = ["Report", "Result", "Verdict"]


@final
class Verdict(enum.Enum):
    """How a rule ended."""

    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"
    SKIP = "skip"
    "it is not asked of this mover, or cannot be checked in this run: `reason` says why"


@final
class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One rule's outcome."""

    rule: str
    title: str
    must: str
    verdict: Verdict
    reason: str = ""
    "one sentence; empty when it passed"
    detail: str = ""
    "the last lines of what a mover's processes wrote to standard error, where one of them ended or hung"
    elapsed_s: float = 0.0


@final
class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A run."""

    subject: str
    "what was checked, as it was asked for: a mover's name, or a consumer's address"
    rules: str = "movers"
    "whose rules: movers, or consumers"
    results: tuple[Result, ...]

    def of(self, verdict: Verdict) -> Sequence[Result]:
        """The results with one verdict, in the order of the rules."""
        return [result for result in self.results if result.verdict is verdict]

    @property
    def ok(self) -> bool:
        """Whether something passed and nothing failed."""
        return bool(self.of(Verdict.PASS)) and not self.of(Verdict.FAIL)

    def to_junit(self) -> bytes:
        """As a JUnit file: one suite, one case for each rule, whose properties hold the sentence of the rule."""
        suite = ET.Element(
            "testsuite",
            name=f"pdhandoff conformance {self.subject}",
            tests=str(len(self.results)),
            failures=str(len(self.of(Verdict.FAIL))),
            skipped=str(len(self.of(Verdict.SKIP))),
            errors="0",
            time=f"{sum(result.elapsed_s for result in self.results):.3f}",
        )
        for result in self.results:
            case = ET.SubElement(
                suite,
                "testcase",
                classname=f"conformance.{self.subject}",
                name=f"{result.rule} {result.title}",
                time=f"{result.elapsed_s:.3f}",
            )
            properties = ET.SubElement(case, "properties")
            ET.SubElement(properties, "property", name="must", value=result.must)
            if result.verdict is Verdict.FAIL:
                ET.SubElement(case, "failure", message=_printable(result.reason)).text = _printable(result.detail)
            elif result.verdict is Verdict.SKIP:
                ET.SubElement(case, "skipped", message=_printable(result.reason))
        suites = ET.Element("testsuites")
        suites.append(suite)
        ET.indent(suites)
        document: bytes = ET.tostring(suites, encoding="utf-8", xml_declaration=True)
        return document


def _printable(text: str) -> str:
    """XML allows no control characters."""
    return "".join(letter if letter in "\n\t" or letter.isprintable() else "?" for letter in text)

"""The kit on movers that keep the rules, that promise little, that crash and that hang; its reports and its command."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from pdhandoff.cli import main
from pdhandoff.engines.base import Mover
from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.testing import ALL_RULES, Report, Result, Sizes, Verdict, run_conformance
from pdhandoff.testing.loading import spell
from testing import strange

DOCS = Path(__file__).parents[2] / "docs" / "conformance.md"
SMALL = Sizes(large_bytes=2 << 20, descriptors=5000, storm_bytes=1 << 20)


def reasons(report: Report, verdict: Verdict) -> dict[str, str]:
    return {result.rule: result.reason for result in report.of(verdict)}


@pytest.mark.slow
def test_loopback_keeps_all_rules_at_full_size() -> None:
    report = run_conformance("loopback")
    assert reasons(report, Verdict.FAIL) == {}
    assert list(reasons(report, Verdict.SKIP)) == ["M-02"]
    assert report.ok


@pytest.mark.slow
def test_wrappers_keep_all_rules() -> None:
    seen: list[Result] = []
    report = run_conformance(strange.wrapped, sizes=SMALL, on_result=seen.append)
    assert reasons(report, Verdict.FAIL) == {}
    assert tuple(seen) == report.results


@pytest.mark.slow
def test_what_is_not_claimed_is_skipped_and_says_what_happens_instead() -> None:
    report = run_conformance(strange.modest, sizes=SMALL)
    assert reasons(report, Verdict.FAIL) == {}
    skipped = reasons(report, Verdict.SKIP)
    assert list(skipped) == ["M-02", "M-24", "M-29", "M-30", "M-31", "M-32", "M-33", "M-36"]
    assert "`fence` is not claimed" in skipped["M-30"]
    assert "quarantine" in skipped["M-30"]


@pytest.mark.slow
def test_a_crash_fails_its_rule_and_the_next_one_runs() -> None:
    report = run_conformance(strange.crashing, rules=["M-01", "M-07", "M-09"], sizes=SMALL)
    assert [result.verdict for result in report.results] == [Verdict.PASS, Verdict.FAIL, Verdict.FAIL]
    crashed, refused = report.results[1:]
    assert "SIGSEGV" in crashed.reason
    assert "strange.py" in crashed.detail
    assert "SIGSEGV" in refused.reason  # in the other process, this time


@pytest.mark.slow
def test_a_call_that_hangs_fails_its_rule_and_shows_where() -> None:
    sizes = Sizes(rule_s=1.0, settle_s=1.0)
    report = run_conformance(strange.hanging, rules=["M-04", "M-11"], sizes=sizes)
    assert [result.verdict for result in report.results] == [Verdict.FAIL, Verdict.PASS]
    assert "in deregister" in report.results[0].detail


@pytest.mark.parametrize(
    ("mover", "words"),
    [
        ("nosuch", "known are loopback"),
        ("nosuch.module:make", "cannot be imported"),
        ("testing.strange:nosuch", "cannot be imported"),
        ("testing.strange:no_mover", "no mover"),
        ("testing.strange:failing", "no such card"),
    ],
)
@pytest.mark.slow
def test_a_mover_that_cannot_be_made_is_named(mover: str, words: str) -> None:
    with pytest.raises(LocalError, match=words):
        run_conformance(mover)


@pytest.mark.slow
def test_an_option_that_the_mover_does_not_have_is_refused() -> None:
    with pytest.raises(LocalError, match="speed") as caught:
        run_conformance("loopback", options={"speed": 11})
    assert caught.value.code is ErrorCode.CONFIG


def test_a_rule_that_does_not_exist_is_refused() -> None:
    with pytest.raises(LocalError, match=r"M-99.*known are M-01 to"):
        run_conformance("loopback", rules=["M-01", "M-99"])


@pytest.mark.parametrize("factory", [lambda: strange.modest, type("Odd", (), {"__module__": "__main__"})])
def test_a_factory_that_no_other_process_finds_is_refused(factory: Callable[..., Mover]) -> None:
    with pytest.raises(LocalError, match="another process"):
        spell(factory)


def test_rules_have_numbers_of_their_own_and_a_must() -> None:
    assert [rule.number for rule in ALL_RULES] == [f"M-{number:02}" for number in range(1, len(ALL_RULES) + 1)]
    assert [rule.number for rule in ALL_RULES if "MUST" not in rule.must] == []


def test_the_page_has_the_table_of_rules() -> None:
    rows = re.findall(r"^\| (M-\d+) \| (.+) \| (.*) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [
        (rule.number, rule.must, f"`{rule.need.capability}`" if rule.need else "every mover") for rule in ALL_RULES
    ]


def result(rule: str, verdict: Verdict, reason: str = "") -> Result:
    return Result(
        rule=rule, title="t", must="It MUST.", verdict=verdict, reason=reason, detail="\x1b[1m", elapsed_s=0.5
    )


def test_junit_counts_and_escapes() -> None:
    report = Report(
        subject="a<b",
        results=(
            result("M-01", Verdict.PASS),
            result("M-02", Verdict.FAIL, "1 < 2 & \x00"),
            result("M-03", Verdict.SKIP, "no"),
        ),
    )
    suite = ET.fromstring(report.to_junit())[0]  # noqa: S314 - we wrote it
    assert {key: suite.attrib[key] for key in ("tests", "failures", "skipped")} == {
        "tests": "3",
        "failures": "1",
        "skipped": "1",
    }
    failure = suite.find(".//failure")
    assert failure is not None
    assert failure.attrib["message"] == "1 < 2 & ?"
    assert failure.text == "?[1m"
    assert not report.ok


def test_nothing_passed_is_not_ok() -> None:
    assert not Report(subject="m", results=(result("M-02", Verdict.SKIP),)).ok


@pytest.mark.slow
def test_the_command_checks_chosen_rules_and_writes_junit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    junit = tmp_path / "out.xml"
    arguments = ["conformance", "--mover", "loopback", "--rule", "M-14", "--rule", "M-01", "--junit", str(junit)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "2 pass, 0 fail, 0 skip" in shown
    assert ET.parse(junit).getroot()[0].attrib["tests"] == "2"  # noqa: S314 - we wrote it


@pytest.mark.slow
def test_the_command_fails_where_a_rule_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["conformance", "--mover", "testing.broken:make", "--option", "rule=M-14", "--rule", "M-14", "--json"]
    assert main(arguments) == 1
    report = json.loads(capsys.readouterr().out)
    assert [(entry["rule"], entry["verdict"]) for entry in report["results"]] == [("M-14", "fail")]


@pytest.mark.parametrize("arguments", [["--mover", "nosuch"], ["--mover", "loopback", "--rule", "M-0"], []])
def test_the_command_names_what_is_known(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", *arguments]) == 1
    assert re.search(r"known are|loopback", capsys.readouterr().err)


def test_the_command_lists_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--list", "--json", "--rule", "M-30"]) == 0
    (rule,) = json.loads(capsys.readouterr().out)
    assert rule["need"]["capability"] == "fence"
    assert main(["conformance", "--list"]) == 0
    assert "M-30" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["protocol", "=3", "a b=3"])
def test_an_option_needs_a_name_and_a_value(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["conformance", "--mover", "loopback", "--option", option])
    assert caught.value.code == 2
    assert "protocol=tcp" in capsys.readouterr().err


@pytest.mark.slow
def test_a_mover_of_an_installed_package_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = tmp_path / "thirdparty-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: thirdparty\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[pdhandoff.movers]\nthirdparty = testing.strange:wrapped\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["conformance", "--mover", "thirdparty", "--rule", "M-12"]) == 0
    assert "thirdparty: 1 pass" in capsys.readouterr().out

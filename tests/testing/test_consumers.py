"""The rules of consumers on real ones: in this process with every policy and guard, and in processes of their own."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pdhandoff import Consumer, HandoffId, Limits, LocalError, Unannounced
from pdhandoff.cli import main
from pdhandoff.demo.wire import Announce, Decoded, NodeReady, Request, Stop, Stopped, decode_event, encode
from pdhandoff.engines.base import MemoryKind, Mover
from pdhandoff.engines.loopback import create
from pdhandoff.errors import ErrorCode
from pdhandoff.testing import Report, Verdict
from pdhandoff.testing.peers import ALL_PEER_RULES, Patience, run_peer_conformance
from support.certificates import Authority
from support.engines import LAYOUT, make_layout

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "conformance.md"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
LIMITS = Limits(
    liveness_s=4.0, heartbeat_s=0.5, handshake_s=3.0, lease_s=3.0, drain_s=1.0, unannounced_s=0.4, ready_s=3.0
)
PATIENCE = Patience(answer_s=30.0, quiet_s=0.1, slack_s=20.0, handshake_s=30.0, free_s=30.0, many=32, queued=3)
QUICK = [rule.number for rule in ALL_PEER_RULES if rule.number not in {"P-13", "P-14", "P-15", "P-38"}]
"those that do not wait for a time-out"
WITHOUT_IDS = [rule.number for rule in ALL_PEER_RULES if not rule.asks]


def consumer(**changes: Any) -> Consumer:
    settings: dict[str, Any] = {
        "mover": "loopback",
        "layout": LAYOUT,
        "arena_bytes": 1 << 20,
        "limits": LIMITS,
        "unannounced": Unannounced.ACCEPT,
    }
    return Consumer(**{**settings, **changes})


def check(at: Consumer, **how: Any) -> Report:
    return run_peer_conformance(str(at.address), **{"patience": PATIENCE, **how})


def verdicts(report: Report, verdict: Verdict) -> dict[str, str]:
    return {result.rule: result.reason for result in report.of(verdict)}


@pytest.mark.slow
def test_a_consumer_keeps_all_rules() -> None:
    with consumer() as one:
        report = check(one)
        book = one.statistics().book
    assert verdicts(report, Verdict.FAIL) == {}
    assert verdicts(report, Verdict.SKIP) == {}
    assert [result.rule for result in report.results] == [rule.number for rule in ALL_PEER_RULES]
    assert book.free_bytes == book.total_bytes


@pytest.mark.slow
def test_a_consumer_with_a_secret_and_tls_keeps_all_rules(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    secret = b"a secret of this test"
    with consumer(secret=secret, tls=authority.issue("decode")) as one:
        report = check(one, secret=secret, tls=authority.issue("kit"))
    assert verdicts(report, Verdict.FAIL) == {}
    assert verdicts(report, Verdict.SKIP) == {}


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Unannounced.REFUSE, Unannounced.WAIT])
def test_a_consumer_whose_front_end_announces_keeps_all_rules(policy: Unannounced) -> None:
    with consumer(unannounced=policy) as one:

        def announce(ids: Sequence[HandoffId]) -> None:
            for handoff in ids:
                one.announce(handoff)
            one.statistics()

        report = check(one, announce=announce, rules=QUICK)
    assert verdicts(report, Verdict.FAIL) == {}
    assert verdicts(report, Verdict.SKIP) == {}


@pytest.mark.slow
@pytest.mark.parametrize("mover", ["nixl", "mooncake"])
def test_rows_may_travel_by_any_mover(mover: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "support.conforming_consumer", mover, *QUICK],
        cwd=ROOT,
        env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))},
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {}, done.stderr[-2000:]


@pytest.mark.slow
def test_without_announced_handoffs_the_rest_is_checked_and_the_reason_given() -> None:
    with consumer(unannounced=Unannounced.REFUSE) as one:
        report = check(one)
    assert [result.rule for result in report.of(Verdict.PASS)] == WITHOUT_IDS
    skipped = verdicts(report, Verdict.SKIP)
    assert skipped["P-26"] == (
        "2 announced handoffs are needed and 0 left: give ids by --handoff, or a command by --announce"
    )
    assert skipped["P-40"].startswith("announced handoffs without end are needed: ")


@pytest.mark.slow
def test_a_memory_that_is_too_large_to_be_filled_is_not() -> None:
    with consumer() as one:
        patience = Patience(full_grants=2, quiet_s=0.1)
        report = check(one, rules=["P-22", "P-40", "P-45"], patience=patience)
        book = one.statistics().book
    assert verdicts(report, Verdict.PASS) == {"P-22": ""}
    skipped = verdicts(report, Verdict.SKIP)
    assert skipped["P-40"] == "2 grants do not fill the consumer's memory: check one with less"
    assert "2 grants do not fill" in skipped["P-45"]
    assert book.free_bytes == book.total_bytes


def open_mover() -> Mover:
    return create()


def test_a_peer_that_is_no_consumer_is_named() -> None:
    with pytest.raises(LocalError, match=r"cannot connect to 127\.0\.0\.1:1: ") as caught:
        run_peer_conformance("127.0.0.1:1")
    assert caught.value.code is ErrorCode.LINK_LOST
    with pytest.raises(LocalError, match="is no address"):
        run_peer_conformance("somewhere")
    with pytest.raises(LocalError, match="there is no rule M-01: known are P-01 to P-45"):
        run_peer_conformance("127.0.0.1:1", rules=["M-01"])


def test_a_consumer_that_does_not_let_the_check_in_says_why() -> None:
    with consumer(secret=b"one") as one:
        for secret, words in (
            (None, "AUTHENTICATION.*set the same secret"),
            (b"two", "AUTHENTICATION.*proof is wrong"),
        ):
            with pytest.raises(LocalError, match=rf"{re.escape(str(one.address))} did not let the check in: {words}"):
                check(one, secret=secret)


def test_a_mover_that_does_not_fit_or_is_unknown_is_refused() -> None:
    with consumer() as one:
        with pytest.raises(LocalError, match="known are loopback"):
            check(one, mover="nosuch")
        with pytest.raises(LocalError, match=r"moves bytes by 'loopback', testing\.strange:renamed is 'renamed'"):
            check(one, mover="testing.strange:renamed")
        report = check(one, mover="testing.test_consumers:open_mover", rules=["P-22"])
    assert report.ok


def test_rows_in_gpu_memory_are_refused_by_a_mover_without() -> None:
    with consumer() as one, pytest.raises(LocalError, match="cuda"):
        check(one, memory=MemoryKind.CUDA, rules=["P-22"])


def test_an_announcement_that_fails_fails_its_rule() -> None:
    with consumer(unannounced=Unannounced.REFUSE) as one:

        def announce(_: Sequence[HandoffId]) -> None:
            raise LocalError(ErrorCode.CONFIG, "the front end is not there")

        report = check(one, announce=announce, rules=["P-22"])
    assert verdicts(report, Verdict.FAIL) == {"P-22": "the front end is not there"}


def test_a_layout_without_scales_goes_through_too() -> None:
    with consumer(layout=make_layout(LAYOUT.components[0])) as one:
        assert check(one, rules=["P-22", "P-28"]).ok


def test_rules_have_numbers_of_their_own_and_a_must() -> None:
    assert [rule.number for rule in ALL_PEER_RULES] == [f"P-{number:02}" for number in range(1, 46)]
    assert [rule.number for rule in ALL_PEER_RULES if "MUST" not in rule.must] == []


def test_the_page_has_the_table_of_rules() -> None:
    rows = re.findall(r"^\| (P-\d+) \| (.+) \| (.*) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(rule.number, rule.must, rule.asks) for rule in ALL_PEER_RULES]


# ---- the command, and consumers of other processes


@pytest.mark.slow
def test_the_command_checks_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    junit = tmp_path / "out.xml"
    with subprocess.Popen(
        [sys.executable, "examples/consumer.py"], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as example:
        assert example.stdout is not None
        *_, address, handoff = example.stdout.readline().split()
        arguments = ["conformance", "--peer", address, "--handoff", handoff, "--attach", "first_token=7"]
        patience = ["--quiet-s", "0.2", "--junit", str(junit)]
        assert main([*arguments, *patience]) == 0
        said = example.stdout.read()
        assert example.wait(60) == 0
    assert said.startswith("100 tokens, decode from token 7, sum of all bytes ")
    assert int(said.split()[-1]) > 0
    shown = capsys.readouterr().out
    assert f"{address} against the rules of consumers" in shown
    assert "22 pass, 0 fail, 23 skip" in shown
    suite = ET.parse(junit).getroot()[0]  # noqa: S314 - we wrote it
    assert (suite.attrib["tests"], suite.attrib["failures"]) == ("45", "0")


@pytest.mark.slow
def test_the_command_checks_with_a_secret_an_announcing_command_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of this test\n")
    told = tmp_path / "told"
    with consumer(secret=b"of this test") as one:
        arguments = ["conformance", "--peer", str(one.address), "--secret-file", str(secret), "--json"]
        script = f"import sys; open({str(told)!r}, 'a').write(sys.argv[1])"
        announce = shlex.join([sys.executable, "-c", script])
        assert main([*arguments, "--announce", announce, "--rule", "P-22", "--rule", "P-05"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(result["rule"], result["verdict"]) for result in results] == [("P-05", "pass"), ("P-22", "pass")]
    HandoffId.parse(told.read_text())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--handoff", "beef"], "--handoff beef"),
        (["--tls-ca", "x"], "give all three"),
        (["--rule", "P-99"], "there is no rule P-99"),
        (["--announce", "/no/such/command", "--rule", "P-22"], "could not be announced"),
    ],
)
def test_the_command_names_what_is_wrong(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with consumer() as one:
        assert main(["conformance", "--peer", str(one.address), *arguments]) == 1
    said = capsys.readouterr()
    assert words in " ".join((said.err + said.out).split())


@pytest.mark.parametrize("text", ["first_token", "=1", "x=1.5", "x=99999999999999999999"])
def test_an_attachment_is_a_name_and_an_integer(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["conformance", "--peer", "127.0.0.1:1", "--attach", text])
    assert caught.value.code == 2
    assert "first_token=42" in capsys.readouterr().err


def test_the_command_lists_the_rules_of_consumers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--list", "--json", "--peer", "anywhere"]) == 0
    rules = json.loads(capsys.readouterr().out)
    assert [rule["rule"] for rule in rules] == [rule.number for rule in ALL_PEER_RULES]
    assert main(["conformance", "--list", "--json", "--rule", "P-22", "--rule", "M-30"]) == 0
    assert [rule["rule"] for rule in json.loads(capsys.readouterr().out)] == ["M-30", "P-22"]


@pytest.mark.slow
def test_the_decode_node_of_the_demo_keeps_the_rules(tmp_path: Path) -> None:
    ids = [HandoffId.mint() for _ in range(22)]
    rules = [f"P-{number}" for number in (16, 17, 18, 19, 20, 21, 22, 23, 24, *range(26, 38), 39)]
    command = [sys.executable, "-m", "pdhandoff.demo.decode_node", "--arena", str(8 << 20)]
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as node:
        assert node.stdin is not None
        assert node.stdout is not None
        ready = decode_event(node.stdout.readline())
        assert isinstance(ready, NodeReady)
        requests = [Request(number=number, handoff=str(each), prompt=[1] * 100) for number, each in enumerate(ids)]
        node.stdin.write(encode(Announce(requests=requests, max_tokens=4)))
        node.stdin.flush()
        assert isinstance(decode_event(node.stdout.readline()), NodeReady)
        report = run_peer_conformance(
            ready.address, handoffs=ids, rules=rules, patience=Patience(quiet_s=0.1, answer_s=20.0)
        )
        ends = [decode_event(node.stdout.readline()) for _ in ids]
        node.stdin.write(encode(Stop(recording=str(tmp_path / "recording"))))
        node.stdin.flush()
        stopped = decode_event(node.stdout.readline())
    assert verdicts(report, Verdict.FAIL) == {}
    assert verdicts(report, Verdict.SKIP) == {}
    decoded = [each for each in ends if isinstance(each, Decoded) and each.code == 0]
    assert len(decoded) >= 5, "what arrived was decoded, like any request"
    assert isinstance(stopped, Stopped)
    assert (stopped.landing_bytes_held, stopped.handoffs) == (0, 0)

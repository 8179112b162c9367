"""The demo as a user runs it: real processes, real sockets, real one-sided writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdhandoff.native import load
from support.transfer_engines import need_mover

PNG = b"\x89PNG\r\n\x1a\n"


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, the JSON report, and what went to standard error."""
    command = [sys.executable, "-m", "pdhandoff", "demo", "--json", "--out", str(tmp_path), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    report = json.loads(ended.stdout) if ended.stdout else {}
    return ended.returncode, report, ended.stderr


@pytest.mark.slow
def test_every_token_is_identical_and_nothing_is_held_afterwards(tmp_path: Path) -> None:
    status, report, said = run(tmp_path)
    assert status == 0, said
    assert [line["identical"] for line in report["requests"]] == [True] * 4
    assert all(line["chunks"] == -(-line["prompt_tokens"] // 128) for line in report["requests"])
    assert all(line["bytes_moved"] == line["prompt_tokens"] * 5 * (656 + 132) for line in report["requests"])
    assert sum(line["drafts_accepted_first_step"] for line in report["requests"]) >= 6
    assert [line["cold_drafts_accepted_first_step"] for line in report["requests"]] == [0] * 4
    assert all(line["steps"] < line["cold_steps"] for line in report["requests"])
    assert report["native"] == load().name
    assert set(report["held_after"].values()) == {0}


@pytest.mark.slow
def test_a_timeline_and_a_trace_are_written(tmp_path: Path) -> None:
    status, report, said = run(tmp_path, "--prompts", "150,70", "--max-tokens", "4", "--listen", "[::1]:0")
    assert status == 0, said
    assert Path(report["timeline"]).read_bytes().startswith(PNG)
    events = json.loads(Path(report["trace"]).read_text(encoding="utf-8"))["traceEvents"]
    assert {"prefill", "gather", "write", "landed", "ready", "convert", "decode"} <= {event["name"] for event in events}
    assert not list(tmp_path.glob("*.recording.json"))


@pytest.mark.slow
def test_a_byte_flipped_in_flight_is_refused_before_the_first_token(tmp_path: Path) -> None:
    status, report, said = run(tmp_path, "--corrupt", "--prompts", "200,150", "--max-tokens", "6")
    assert status == 0, said
    corrupted, clean = report["requests"]
    assert corrupted["refused"] == "DIGEST_MISMATCH"
    assert corrupted["identical"] is None
    assert corrupted["drafts_accepted_first_step"] is None
    assert clean["identical"] is True
    assert set(report["held_after"].values()) == {0}


MOVERS = {
    "nixl": ("--mover-option", "transports=tcp,self", "--mover-option", 'ucx={"NET_DEVICES": "lo"}'),
    "mooncake": ("--mover-option", "stall_s=5", "--mover-option", "log_level=silent"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mover", MOVERS)
def test_every_token_is_identical_over_other_movers(tmp_path: Path, mover: str) -> None:
    need_mover(mover)
    status, report, said = run(tmp_path, "--mover", mover, *MOVERS[mover], "--prompts", "200,150", "--max-tokens", "4")
    assert status == 0, said
    assert [line["identical"] for line in report["requests"]] == [True, True]
    assert set(report["held_after"].values()) == {0}


@pytest.mark.slow
@pytest.mark.parametrize("mover", MOVERS)
def test_a_byte_flipped_in_flight_is_refused_over_other_movers(tmp_path: Path, mover: str) -> None:
    need_mover(mover)
    status, report, said = run(
        tmp_path, "--mover", mover, *MOVERS[mover], "--corrupt", "--prompts", "200,150", "--max-tokens", "4"
    )
    assert status == 0, said
    corrupted, clean = report["requests"]
    assert corrupted["refused"] == "DIGEST_MISMATCH"
    assert corrupted["identical"] is None
    assert clean["identical"] is True
    assert set(report["held_after"].values()) == {0}


KILLS = [
    *(("producer", step) for step in ("offer", "grant", "gather", "write", "commit")),
    *(("consumer", step) for step in ("landed", "ready", "convert", "decode")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("side", "step"), KILLS, ids=[f"{side}-{step}" for side, step in KILLS])
def test_a_process_killed_at_a_step_leaves_the_other_clean_and_a_second_try_identical(
    tmp_path: Path, side: str, step: str
) -> None:
    arguments = ("--kill", side, "--at", step, "--prompts", "200,150", "--max-tokens", "4")
    status, report, said = run(tmp_path, *arguments)
    assert status == 0, said
    assert report["killed"] == side
    assert [line["identical"] for line in report["requests"]] == [True, True]
    assert set(report["held_after"].values()) == {0}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--at", "offer"), "--kill"),
        (("--kill", "producer", "--at", "decode"), "gather"),
        (("--prompts", "0"), "at least 1"),
        (("--mover", "pigeon"), "loopback"),
        (("--mover-option", "wings=2"), "wings"),
        (("--listen", "nowhere"), "host:port"),
        (("--corrupt", "--kill", "producer"), "choose one"),
    ],
)
@pytest.mark.slow
def test_wrong_usage_says_what_is_right(tmp_path: Path, arguments: tuple[str, ...], word: str) -> None:
    status, report, said = run(tmp_path, *arguments)
    assert status == 1
    assert report == {}
    assert word in said

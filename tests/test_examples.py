"""The examples, as a reader would run them: two real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.slow
def test_the_producer_hands_one_request_to_the_consumer() -> None:
    with subprocess.Popen(
        [sys.executable, "examples/consumer.py"], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as consumer:
        assert consumer.stdout is not None
        command = consumer.stdout.readline().split()
        assert command[:2] == [sys.executable, "examples/producer.py"]
        producer = run(*command[1:])
        assert producer.returncode == 0, producer.stderr
        said = consumer.stdout.read()
        assert consumer.wait(60) == 0
    assert said.startswith("100 tokens, decode from token 42, sum of all bytes ")
    assert said.split()[-1] == producer.stdout.split()[-1], "what was decoded from is what was prefilled"


@pytest.mark.slow
def test_a_producer_that_finds_nobody_says_so() -> None:
    producer = run("examples/producer.py", "127.0.0.1:1", "0" * 32)
    assert producer.returncode == 1
    assert producer.stdout.startswith("not handed off: LINK_LOST: 127.0.0.1:1: ")

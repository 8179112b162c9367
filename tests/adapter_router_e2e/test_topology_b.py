"""Topology B for real: one prefill server feeds a decode node and a native vLLM decode server at the same time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import pytest

from support.up import Up, ask, together

CORES = 4
"two vLLM workers and the progress threads of their NIXL agents spin: with less, a native answer takes a minute"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(360),
    pytest.mark.skipif((os.cpu_count() or 1) < CORES, reason=f"topology-b: less than {CORES} cores here"),
]

NATIVE = {"x-pdhandoff-pool": "native"}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("topology-b")
    with Up(folder, "-m", "pdhandoff", "up", "topology-b", "--out", str(folder)) as up:
        yield up
    assert up.process.returncode == 130, up.output
    up.wait_gone()


@pytest.mark.parametrize(
    ("api", "stream"), [("chat", True), ("completions", False), ("responses", False), ("messages", True)]
)
def test_both_pools_answer_as_vllm_alone(up: Up, api: str, stream: bool) -> None:
    text = "over the edge of a block " * 12
    handed = ask(api, up.ready["url"], text, stream=stream)
    native = ask(api, up.ready["url"], text, stream=stream, headers=NATIVE)
    alone = ask(api, up.ready["prefill"], text, stream=stream)
    assert handed.headers["x-pdhandoff-path"] == "handoff"
    assert native.headers["x-pdhandoff-path"] == "native"
    assert handed.same(alone), (handed, alone)
    assert native.same(alone), (native, alone)
    up.idle()


def test_both_pools_at_once_out_of_one_prefill_server(up: Up) -> None:
    texts = [f"request {number} " + "and more " * (10 * number) for number in range(6)]
    ways = [NATIVE if number % 2 else {} for number in range(len(texts))]
    answers = list(
        together(
            [
                partial(ask, "chat", up.ready["url"], text, headers=way, stream=number % 3 == 0)
                for number, (text, way) in enumerate(zip(texts, ways, strict=True))
            ]
        )
    )
    for number, (text, way) in enumerate(zip(texts, ways, strict=True)):
        assert answers[number].headers["x-pdhandoff-path"] == ("native" if way else "handoff")
        alone = ask("chat", up.ready["prefill"], text)
        assert answers[number].same(alone), (text, answers[number], alone)
    up.idle()

"""`pdhandoff up` as a supervisor: whatever happens, it says so and leaves nothing behind. Small processes, no vLLM."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from pdhandoff.errors import LocalError
from pdhandoff_router.up.tiny_model import make_tiny_model
from pdhandoff_router.up.topology import Choices, Topology, plan
from pdhandoff_router.up.vllm_python import find_vllm_python
from support.child import ROOT
from support.engines import until
from support.up import Up, alive

pytestmark = pytest.mark.slow

CHILD = str(ROOT / "tests" / "support" / "up_child.py")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
def test_a_signal_ends_all(tmp_path: Path, number: signal.Signals, status: int) -> None:
    with Up(tmp_path, CHILD, "serves", "serves", "serves") as up:
        assert up.ready["pid"] == up.process.pid
        assert all(map(alive, up.ready["processes"].values()))
        up.signal(number)
        assert up.wait() == status
        assert not any(map(alive, up.ready["processes"].values()))
        assert not (tmp_path / "ready.json").exists()


def test_what_ignores_the_signal_is_killed_with_its_children(tmp_path: Path) -> None:
    with Up(tmp_path, CHILD, "stubborn", "serves") as up:
        log = (tmp_path / "stubborn-0.log").read_text(encoding="utf-8")
        child = int(log.split("child ")[1].split()[0])
        assert alive(child)
        up.signal(signal.SIGINT)
        assert up.wait() == 130
        until(lambda: not alive(child), "the end of the child")


def test_when_it_is_killed_itself_its_keeper_ends_the_rest(tmp_path: Path) -> None:
    with Up(tmp_path, CHILD, "serves", "serves") as up:
        up.signal(signal.SIGKILL)
        up.wait_gone()


def test_when_one_dies_the_end_of_its_log_is_shown_and_all_end(tmp_path: Path) -> None:
    with Up(tmp_path, CHILD, "serves", "serves") as up:
        victim = up.ready["processes"]["serves-0"]
        up_pids = list(up.ready["processes"].values())
        os.kill(victim, signal.SIGKILL)
        assert up.wait() == 1
        assert "serves-0 has ended with status -9" in up.output
        assert "this is serves" in up.output
        assert not any(map(alive, up_pids))


def test_one_that_cannot_start_is_named(tmp_path: Path) -> None:
    up = Up(tmp_path, CHILD, "serves", "dies", "serves")
    assert up.wait() == 1
    assert "dies-1 has ended with status 1" in up.output
    assert "cannot go on" in up.output


def test_one_that_never_gets_ready_is_named(tmp_path: Path) -> None:
    up = Up(tmp_path, CHILD, "serves", "silent", "serves")
    assert up.wait() == 1
    assert "silent-1 is not ready after 5 s" in up.output


def choices(folder: Path, topology: Topology) -> Choices:
    model = make_tiny_model(folder / "tiny")
    return Choices(topology=topology, model=model, name="tiny", folder=folder, vllm_python=Path("python"))


def test_the_processes_of_each_topology(tmp_path: Path) -> None:
    alone, both = (plan(choices(tmp_path, topology)) for topology in Topology)
    assert [part.name for part in alone.engines] == ["prefill", "decode-0"]
    assert [part.name for part in both.engines] == ["prefill", "native", "decode-0"]
    assert len({part.url for part in (*both.engines, *both.router)}) == 4
    config = json.loads(both.engines[0].command[both.engines[0].command.index("--kv-transfer-config") + 1])
    assert config["kv_connector"] == "MultiConnector"


def test_a_model_with_a_draft_layer_speculates_on_both_sides(tmp_path: Path) -> None:
    chosen = choices(tmp_path, Topology.A)
    config = chosen.model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_bytes()), "num_nextn_predict_layers": 1}), encoding="utf-8")
    prefill, node = plan(chosen).engines
    assert "--speculative-config" in prefill.command
    assert "spec_depth=1" in node.command


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"no model in Hugging Face's format"):
        plan(Choices(topology=Topology.A, model=tmp_path, name="x", folder=tmp_path, vllm_python=Path("python")))


def test_an_interpreter_without_vllm_is_named() -> None:
    with pytest.raises(LocalError, match=r"has no vllm"):
        find_vllm_python(Path(sys.executable), native=False)
    with pytest.raises(LocalError, match=r"there is no file"):
        find_vllm_python(Path("/nowhere/python"), native=False)

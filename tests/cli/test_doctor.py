"""The doctor and its movers: each thing that can be wrong with one is found, by name; and the command line."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdhandoff.cli.checks import Check, Finding, Report, Status, show
from pdhandoff.cli.checks.child import Child, ProbeEnded
from pdhandoff.cli.checks.movers import Ask, check_mover
from pdhandoff.cli.checks.versions import Torch
from pdhandoff.cli.main import main
from pdhandoff.engines import registry
from pdhandoff.runtime.address import listen, parse_address
from support.engines import until

ROOT = Path(__file__).parents[2]
WITHIN_S = 30.0

pytestmark = pytest.mark.slow


def findings(name: str, *, within_s: float = WITHIN_S, torch: Torch | None = None, **options: object) -> list[Finding]:
    ask = Ask(name, by_name=True, options=options, within_s=within_s, torch=torch or Torch())
    return list(check_mover(ask))


def wrong(name: str, step: str, **how: Any) -> Finding:
    """The only problem with a mover, which is the last that is said of it."""
    *others, last = findings(f"support.doctor_movers:{name}", **how)
    assert last.check == f"mover.support.doctor_movers:{name}.{step}"
    assert last.status is Status.PROBLEM
    assert not [finding for finding in others if finding.status is Status.PROBLEM]
    assert last.advice
    return last


@pytest.mark.parametrize("name", ["loopback", "support.doctor_movers:sound", "support.doctor_movers:chatty"])
def test_a_sound_mover_passes_every_step(name: str) -> None:
    found = findings(name)
    assert [finding.check.removeprefix(f"mover.{name}.") for finding in found] == [
        "made", "capabilities", "register.cpu", "write.cpu", "register.cuda",
    ]  # fmt: skip
    assert [finding.status for finding in found] == [Status.OK] * 4 + [Status.SKIPPED]
    write = found[3]
    assert isinstance(write.facts["first_s"], float)
    assert " ms" in write.says


@pytest.mark.parametrize(("name", "modules"), [("nixl", ("nixl_cu13", "nixl_cu12")), ("mooncake", ("mooncake",))])
def test_the_movers_of_wheels_pass_where_they_are_installed(name: str, modules: tuple[str, ...]) -> None:
    if not any(importlib.util.find_spec(module) for module in modules):
        pytest.skip(f"{name} is not installed")
    found = findings(name)
    assert not [finding for finding in found if finding.status is Status.PROBLEM]
    assert found[0].facts["wheels"]
    assert found[3].check == f"mover.{name}.write.cpu"
    if name == "nixl":
        assert found[3].facts["transports"]


def test_T093_a_registration_that_fails_is_not_ready() -> None:
    found = wrong("register_fails", "register.cpu")
    assert "registration 0 fails" in found.says
    assert "not ready" in found.advice


@pytest.mark.parametrize(("name", "first"), [("flips_a_bit", 1234), ("flips_a_bit_later", 7)])
def test_T093_a_probe_write_that_lands_wrong_is_caught(name: str, first: int) -> None:
    found = wrong(name, "write.cpu")
    assert f"1 of 4096 bytes are wrong, the first at {first}" in found.says
    assert found.facts == {"wrong": 1, "first": first, "outside": 0}


def test_a_write_outside_the_grant_is_caught() -> None:
    found = wrong("strays", "write.cpu")
    assert "1 bytes beside it" in found.says


def test_a_write_that_fails_says_why() -> None:
    assert "meets 'fail'" in wrong("write_fails", "write.cpu").says


def test_a_write_that_never_settles_ends_by_its_deadline() -> None:
    assert "still says pending" in wrong("never_settles", "write.cpu", within_s=3.0).says


def test_a_mover_that_hangs_is_ended() -> None:
    assert "did not come back from 'open' within 3 s" in wrong("hangs", "made", within_s=3.0).says


def test_a_mover_that_crashes_leaves_its_last_words() -> None:
    found = wrong("dies", "made")
    assert "SIGABRT" in found.says
    assert "the driver is not there" in found.says


def test_a_mover_that_refuses_speaks_for_itself() -> None:
    found = wrong("refuses", "made", why="its slot is empty")
    assert found.says == "no card: its slot is empty"
    assert found.facts["code"] == 80


def test_an_option_that_a_mover_does_not_know_is_named() -> None:
    assert "colour" in wrong("sound", "made", colour="red").says


def test_a_missing_system_library_is_named_with_what_has_it() -> None:
    found = wrong("lacks_a_library", "made")
    assert "libibverbs.so.1" in found.advice


def test_the_packages_of_a_known_mover_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdhandoff.cli.checks.movers.importlib.util.find_spec", lambda _: object())
    refusal = {"refused": "cannot be loaded (libibverbs.so.1: cannot open shared object file)", "code": 80}
    monkeypatch.setattr(Child, "ask", lambda *_, **__: refusal)
    (found,) = findings("mooncake")
    assert found.status is Status.PROBLEM
    assert found.command == "apt-get install libibverbs1 librdmacm1 libnuma1 libcurl4"


@pytest.mark.parametrize("by_name", [True, False])
def test_a_missing_wheel_is_a_problem_only_where_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, by_name: bool
) -> None:
    monkeypatch.setattr("pdhandoff.cli.checks.movers.importlib.util.find_spec", lambda _: None)
    (found,) = check_mover(Ask("nixl", by_name=by_name, options={}, within_s=WITHIN_S, torch=Torch()))
    assert found.status is (Status.PROBLEM if by_name else Status.SKIPPED)
    assert found.command == "pip install 'pdhandoff[nixl]'"


def test_an_unknown_mover_gets_the_list_of_known_ones() -> None:
    (found,) = findings("carrier-pigeon")
    assert found.status is Status.PROBLEM
    assert all(name in found.advice for name in registry.known())


@pytest.mark.parametrize("name", ["nowhere.at_all:create", "support.doctor_movers:absent", "support:doctor:movers"])
def test_a_factory_that_cannot_be_found_is_named(name: str) -> None:
    (found,) = findings(name)
    assert found.status is Status.PROBLEM
    assert name in found.says


def test_a_mover_without_proofs_is_a_warning() -> None:
    found = findings("support.doctor_movers:no_proofs")
    assert found[1].status is Status.WARNING
    assert "quarantine for good" in found[1].advice
    assert found[1].facts["fence"] is False


def test_gpu_memory_that_a_mover_cannot_move_is_a_warning() -> None:
    found = findings("loopback", torch=Torch("2.13.0", "CUDA 13.0", ("H200",)))
    assert found[-1].status is Status.WARNING
    assert "no GPU memory" in found[-1].says


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nixl"])
def test_gpu_memory_is_written_and_compared(name: str) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    found = findings(name, torch=Torch(torch.__version__, "CUDA", (torch.cuda.get_device_name(0),)))
    assert found[-1].check == f"mover.{name}.write.cuda"
    assert found[-1].status in {Status.OK, Status.WARNING}


def test_a_child_is_ended_with_its_block() -> None:
    with Child() as child:
        assert child.ask("open", WITHIN_S, mover="loopback", options={})["name"] == "loopback"
        pid = child.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with Child() as child:
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(ProbeEnded, match="SIGKILL"):
            child.ask("identity", 30.0)


# ---- the command line


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the second that torch takes."""
    monkeypatch.setitem(sys.modules, "torch", None)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["doctor", "--json", *arguments])
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    return status, report


@pytest.mark.usefixtures("quick")
def test_the_form_of_json_is_stable(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run_json(capsys, "--mover", "loopback", "--listen", "127.0.0.1:0")
    assert status == 0
    assert list(report) == ["schema", "pdhandoff", "ok", "counts", "findings"]
    assert report["schema"] == 1
    assert report["ok"] is True
    assert list(report["counts"]) == ["OK", "WARNING", "PROBLEM", "SKIPPED"]
    assert sum(report["counts"].values()) == len(report["findings"])
    for finding in report["findings"]:
        assert list(finding) == ["check", "status", "says", "advice", "command", "facts"]
        assert finding["says"]
    assert [finding["check"] for finding in report["findings"]] == [
        "python", "pdhandoff", "msgspec", "cffi", "torch", "allocator", "locked-memory", "shared-memory", "open-files",
        "addresses", "default-route", "listen.address", "listen.port", "mover.loopback.made",
        "mover.loopback.capabilities", "mover.loopback.register.cpu", "mover.loopback.write.cpu",
        "mover.loopback.register.cuda",
    ]  # fmt: skip
    assert msgspec.convert(report, Report).findings[0].check == "python"


@pytest.mark.usefixtures("quick")
def test_T092_a_busy_port_ends_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with listen(parse_address("127.0.0.1:0")) as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        status, report = run_json(capsys, "--mover", "loopback", "--listen", address)
    assert status == 1
    assert report["ok"] is False
    (problem,) = [finding for finding in report["findings"] if finding["status"] == "PROBLEM"]
    assert problem["check"] == "listen.port"
    assert address in problem["says"]


@pytest.mark.usefixtures("quick")
def test_the_environment_of_the_process_is_looked_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    status, report = run_json(capsys, "--mover", "loopback")
    found = {finding["check"]: finding for finding in report["findings"]}
    assert status == 0
    assert found["allocator"]["command"] == "unset PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.usefixtures("quick")
def test_an_option_reaches_its_mover(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--mover", "support.doctor_movers:refuses", "--option", "why=dust")
    status, report = run_json(capsys, *arguments)
    assert status == 1
    assert report["findings"][-1]["says"] == "no card: dust"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--option", "a=1"), "--option belongs to one mover"),
        (("--listen", "5556"), "is no address"),
        (("--peer", "host"), "is no address"),
        (("--secret-file", "/nonexistent/secret"), "cannot be read"),
        (("--secret-file", os.devnull), "is empty"),
    ],
)
def test_arguments_that_make_no_sense_are_named_before_anything_runs(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    assert main(["doctor", *arguments]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--within", "soon"), ("--within", "0"), ("--option", "protocol")])
def test_wrong_usage_ends_with_status_2(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *arguments])
    assert caught.value.code == 2


FINDINGS = (
    Finding(check="one", status=Status.OK, says="fine [really]"),
    Finding(check="two", status=Status.WARNING, says="so so", advice="do this", command="run that"),
    Finding(check="three", status=Status.PROBLEM, says="bad"),
)


@pytest.mark.parametrize("rich", [True, False])
def test_findings_are_shown_with_and_without_rich(monkeypatch: pytest.MonkeyPatch, rich: bool) -> None:
    monkeypatch.setattr(show, "_has_rich", lambda: rich)
    out = io.StringIO()
    show.print_findings(FINDINGS, out)
    text = out.getvalue()
    for part in ("OK", "WARNING", "PROBLEM", "fine [really]", "do this", "$ run that", "not ready: 1 OK, 1 WARNING"):
        assert part in text
    out = io.StringIO()
    show.print_findings(FINDINGS[:2], out)
    assert "ready, with warnings" in out.getvalue()


@pytest.mark.parametrize("rich", [True, False])
def test_progress_goes_to_a_terminal_s_standard_error(monkeypatch: pytest.MonkeyPatch, rich: bool) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(show, "_has_rich", lambda: rich)
    monkeypatch.setattr(sys, "stderr", terminal)
    found = show.collect([Check("looking at things", lambda: FINDINGS), Check("and more", list)])
    assert found == list(FINDINGS)
    if not rich:
        assert "looking at things (1 of 2)" in terminal.getvalue()


def test_an_interrupt_ends_the_children(tmp_path: Path) -> None:
    marker = tmp_path / "pids"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "PIDS": str(marker)}
    command = [sys.executable, "-m", "pdhandoff", "doctor", "--mover", "support.doctor_movers:tells_and_hangs"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        until(marker.exists, "the mover is being made", timeout_s=60.0)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30.0)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "interrupted" in errors
    child = int(marker.read_text())
    until(lambda: not Path(f"/proc/{child}").exists(), "the child has ended")


def test_the_parser_imports_nothing_heavy() -> None:
    program = (
        "import sys, pdhandoff.cli.main as m; "
        "sys.exit(bool({'torch', 'numpy', 'rich', 'msgspec', 'pdhandoff.cli.checks'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT).returncode == 0

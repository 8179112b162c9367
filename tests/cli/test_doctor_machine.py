"""What the doctor finds in a machine's versions, limits and addresses; the machine is made up."""

from __future__ import annotations

import importlib.metadata
import ipaddress
import resource
import socket
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from pdhandoff.cli.checks import Finding, Status
from pdhandoff.cli.checks.addresses import check_addresses, check_listen, resolve_within
from pdhandoff.cli.checks.interfaces import LocalAddress, local_addresses
from pdhandoff.cli.checks.settings import check_settings, size
from pdhandoff.cli.checks.system import System
from pdhandoff.cli.checks.versions import Torch, check_torch, check_versions, find_torch, release
from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.runtime import address as runtime_address
from pdhandoff.runtime.address import Address, listen

UNLIMITED = resource.RLIM_INFINITY
HEADER = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"


def local(*pairs: str) -> tuple[LocalAddress, ...]:
    """From "eth0 10.0.0.5" texts."""
    split = [pair.split() for pair in pairs]
    return tuple(LocalAddress(ipaddress.ip_address(address), name) for name, address in split)


LOOPBACK = ("lo 127.0.0.1", "lo ::1", "eth0 fe80::1")
TWO_HOMES = local(*LOOPBACK, "eth0 10.0.0.5", "eth0 fd00::5", "ib0 192.168.7.5")


def machine(root: Path, **changes: Any) -> System:
    """One in which nothing is wrong, but for what is given."""
    plain: dict[str, Any] = {
        "environment": {},
        "root": root,
        "addresses": lambda: local(*LOOPBACK, "eth0 10.0.0.5"),
        "limit": lambda _: (UNLIMITED, UNLIMITED),
        "space": lambda _: (8 << 30, 8 << 30),
    }
    return System(**{**plain, **changes})


def write(root: Path, path: str, *lines: str) -> None:
    """A file of the made-up machine."""
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def by_check(findings: Iterable[Finding]) -> dict[str, Finding]:
    """By their names, which are not repeated."""
    found = list(findings)
    named = {finding.check: finding for finding in found}
    assert len(named) == len(found)
    return named


def test_nothing_is_wrong_with_a_good_machine(tmp_path: Path) -> None:
    system = machine(tmp_path)
    found = [*check_versions(), *check_settings(system), *check_addresses(system)]
    assert {finding.status for finding in found} == {Status.OK}
    assert not any(finding.command for finding in found)


def test_this_machine_can_be_read() -> None:
    system = System.here()
    found = by_check([*check_settings(system), *check_addresses(system)])
    assert "127.0.0.1" in str(found["addresses"].facts["ipv4"])
    assert found["open-files"].facts["soft"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


# ---- versions


@pytest.mark.parametrize(("version", "says"), [("0.19.0", "is older than 0.20"), (None, "is not installed")])
def test_an_old_or_missing_package_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, version: str | None, says: str
) -> None:
    real = importlib.metadata.version

    def fake(name: str) -> str:
        if name != "msgspec":
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", fake)
    found = by_check(check_versions())["msgspec"]
    assert found.status is Status.PROBLEM
    assert says in found.says
    assert found.command == "pip install 'msgspec>=0.20'"


def test_a_newer_python_is_only_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    assert by_check(check_versions())["python"].status is Status.WARNING


def test_a_version_is_its_leading_numbers() -> None:
    assert release("2.13.0+cpu") == (2, 13, 0)
    assert release("2.14.0rc1") == (2, 14)
    assert release("unknown") == ()


def test_torch_may_be_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = check_torch(find_torch(10.0), machine(tmp_path))
    assert found.status is Status.WARNING
    assert found.says == "torch is not installed"
    assert found.command == "pip install 'torch>=2.11'"
    assert found.facts["version"] is None


def test_a_folder_named_torch_is_no_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert "hidden by a folder" in find_torch(10.0).why


@pytest.mark.slow
def test_a_broken_torch_harms_only_the_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path, "torch/__init__.py", "import os, sys; sys.stderr.write('no driver' + chr(10)); sys.stderr.flush()")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with (tmp_path / "torch/__init__.py").open("a", encoding="utf-8") as file:
        file.write("os.abort()\n")
    why = find_torch(30.0).why
    assert "SIGABRT" in why
    assert "no driver" in why
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('libcudart.so.13: no such file')\n")
    assert "libcudart.so.13" in find_torch(30.0).why


@pytest.mark.slow
def test_torch_says_which_build_it_is() -> None:
    torch = pytest.importorskip("torch")
    found = find_torch(60.0)
    assert found.version == torch.__version__
    assert found.build == (f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU")


@pytest.mark.parametrize(
    ("torch", "card", "status", "says"),
    [
        (Torch("2.13.0+cpu", "CPU"), False, Status.OK, "CPU build"),
        (Torch("2.13.0+cpu", "CPU"), True, Status.WARNING, "on a host with an NVIDIA card"),
        (Torch("2.13.0+cu130", "CUDA 13.0"), True, Status.WARNING, "sees no GPU"),
        (Torch("2.13.0+cu130", "CUDA 13.0", ("H200", "H200")), True, Status.OK, "sees 2 GPUs: H200"),
        (Torch("2.4.0+cu121", "CUDA 12.1", ("H200",)), True, Status.WARNING, "sees 1 GPU: H200"),
    ],
)
def test_what_a_build_of_torch_means(tmp_path: Path, torch: Torch, card: bool, status: Status, says: str) -> None:
    if card:
        write(tmp_path, "dev/nvidiactl")
    found = check_torch(torch, machine(tmp_path))
    assert found.status is status
    assert says in found.says


# ---- settings


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("expandable_segments:True", Status.WARNING),
        ("max_split_size_mb:128, expandable_segments : true", Status.WARNING),
        ("expandable_segments:False", Status.OK),
        ("garbage", Status.OK),
        ("", Status.OK),
    ],
)
def test_expandable_segments_break_registration(tmp_path: Path, name: str, value: str, status: Status) -> None:
    found = by_check(check_settings(machine(tmp_path, environment={name: value})))["allocator"]
    assert found.status is status
    assert found.command == (f"unset {name}" if status is Status.WARNING else "")
    assert found.facts == {name: value}


def test_locked_memory_matters_with_an_rdma_card(tmp_path: Path) -> None:
    def locked(soft: int, hard: int) -> Finding:
        return by_check(check_settings(machine(tmp_path, limit=lambda _: (soft, hard))))["locked-memory"]

    assert locked(64 << 10, 64 << 10).status is Status.OK
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    found = locked(64 << 10, 64 << 10)
    assert found.status is Status.PROBLEM
    assert "64 KiB" in found.says
    assert "mlx5_0" in found.says
    assert found.command == ""
    assert locked(64 << 10, UNLIMITED).command == "ulimit -l unlimited"
    assert locked(UNLIMITED, UNLIMITED).status is Status.OK
    assert locked(8 << 30, 8 << 30).status is Status.OK


def test_a_small_dev_shm_is_named_with_its_size(tmp_path: Path) -> None:
    def shared(total: int, free: int) -> Finding:
        return by_check(check_settings(machine(tmp_path, space=lambda _: (total, free))))["shared-memory"]

    found = shared(64 << 20, 60 << 20)
    assert found.status is Status.WARNING
    assert "60 MiB of 64 MiB" in found.says
    assert "size=1g" in found.command
    assert shared(8 << 30, 1 << 20).command == "ls -l /dev/shm"


def test_no_dev_shm_is_a_warning(tmp_path: Path) -> None:
    def none(_: Path) -> tuple[int, int]:
        raise FileNotFoundError(2, "No such file or directory")

    found = by_check(check_settings(machine(tmp_path, space=none)))["shared-memory"]
    assert found.status is Status.WARNING
    assert "No such file" in found.says


def test_few_open_files_are_a_warning(tmp_path: Path) -> None:
    def files(soft: int, hard: int) -> Finding:
        return by_check(check_settings(machine(tmp_path, limit=lambda _: (soft, hard))))["open-files"]

    assert files(1024, 1024).status is Status.OK
    assert files(256, 4096).status is Status.WARNING
    assert files(256, 4096).command == "ulimit -n 4096"
    assert files(256, UNLIMITED).command == "ulimit -n 65536"
    assert files(256, 256).command == ""


def test_sizes_are_written_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1536, 64 << 20, 1 << 40)] == [
        "0 bytes", "1023 bytes", "1 KiB", "1.5 KiB", "64 MiB", "1 TiB",
    ]  # fmt: skip


# ---- addresses


def test_the_kernel_lists_this_machine_s_addresses() -> None:
    found = local_addresses()
    names = {name for _, name in socket.if_nameindex()}
    assert ipaddress.ip_address("127.0.0.1") in {each.address for each in found}
    assert {each.interface for each in found} <= names
    assert [each.address.version for each in found] == sorted(each.address.version for each in found)


def test_addresses_are_listed_by_family(tmp_path: Path) -> None:
    found = by_check(check_addresses(machine(tmp_path, addresses=lambda: TWO_HOMES)))["addresses"]
    assert found.status is Status.OK
    assert found.says == "eth0: 10.0.0.5, fd00::5; ib0: 192.168.7.5"
    assert found.facts["ipv4"] == ("127.0.0.1", "10.0.0.5", "192.168.7.5")
    assert found.facts["ipv6"] == ("::1", "fe80::1", "fd00::5")
    assert "several interfaces" in found.advice


def test_a_machine_that_only_has_loopback_is_told_so(tmp_path: Path) -> None:
    found = by_check(check_addresses(machine(tmp_path, addresses=lambda: local(*LOOPBACK))))["addresses"]
    assert found.status is Status.WARNING
    assert "peers on other hosts cannot" in found.says


def test_a_kernel_that_does_not_answer_is_no_crash(tmp_path: Path) -> None:
    def refused() -> tuple[LocalAddress, ...]:
        raise PermissionError(1, "Operation not permitted")

    (found,) = check_addresses(machine(tmp_path, addresses=refused))
    assert found.status is Status.SKIPPED
    listened = by_check(check_listen("127.0.0.1:0", machine(tmp_path, addresses=refused), 5.0))
    assert listened["listen.address"].status is Status.OK


@pytest.fixture
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail on anything that would send to, or connect to, anybody."""

    def contact(*_: object) -> None:
        raise AssertionError("an address was contacted")

    sealed = type("Sealed", (socket.socket,), dict.fromkeys(("connect", "connect_ex", "sendto"), contact))
    monkeypatch.setattr(socket, "socket", sealed)


@pytest.mark.usefixtures("no_probe")
@pytest.mark.parametrize("default", ["eth0", "ib0", None])
def test_T091_the_configured_address_is_advertised_whatever_the_routes(tmp_path: Path, default: str | None) -> None:
    rows = [f"{default} 00000000 010200C0 0003 0 0 0 00000000 0 0 0"] if default else []
    write(tmp_path, "proc/net/route", HEADER, "eth0 0000000A 00000000 0001 0 0 0 00FFFFFF 0 0 0", *rows)
    system = machine(tmp_path, addresses=lambda: (*TWO_HOMES, *local_addresses()))
    route = by_check(check_addresses(system))["default-route"]
    assert route.status is Status.OK
    assert route.facts["ipv4"] == ((default,) if default else ())
    for text, advertised, interface in (
        ("10.0.0.5:0", "10.0.0.5:0", "eth0"),
        ("192.168.7.5:0", "192.168.7.5:0", "ib0"),
        ("[fd00::5]:0", "[fd00::5]:0", "eth0"),
    ):
        found = next(iter(check_listen(text, system, 5.0)))
        assert found.status is Status.OK
        assert found.facts["advertised"] == advertised
        assert found.facts["interface"] == interface


def test_the_default_route_is_read_in_both_families(tmp_path: Path) -> None:
    zeros = "0" * 32
    write(
        tmp_path,
        "proc/net/ipv6_route",
        f"{zeros} 00 {zeros} 00 fd{zeros[2:]} 00000400 00000002 00000000 00000003     eth1",
        f"{zeros} 00 {zeros} 00 {zeros} ffffffff 00000001 00000000 00200200       lo",
        f"fd{zeros[2:]} 40 {zeros} 00 {zeros} 00000100 00000001 00000000 00000001     eth2",
    )
    found = by_check(check_addresses(machine(tmp_path)))["default-route"]
    assert found.facts == {"ipv4": (), "ipv6": ("eth1",)}
    assert "IPv6 by eth1" in found.says


@pytest.mark.parametrize("text", [":0", "[::]:0", "0.0.0.0:0"])
def test_a_listener_on_every_address_of_a_multi_homed_host_must_choose(tmp_path: Path, text: str) -> None:
    found = by_check(check_listen(text, machine(tmp_path, addresses=lambda: TWO_HOMES), 5.0))["listen.address"]
    assert found.status is Status.WARNING
    assert "2 interfaces" in found.says
    assert found.facts["advertised"] is None
    reached = {"10.0.0.5:0", "192.168.7.5:0"} | (set() if text == "0.0.0.0:0" else {"[fd00::5]:0"})
    assert set(found.facts["reached_by"] or ()) == reached  # type: ignore[arg-type]
    assert found.command == "pdhandoff doctor --listen 10.0.0.5:0"


def test_a_listener_on_every_address_of_one_interface_names_it(tmp_path: Path) -> None:
    found = by_check(check_listen(":0", machine(tmp_path), 5.0))["listen.address"]
    assert found.status is Status.OK
    assert "tell peers 10.0.0.5:0" in found.says
    alone = machine(tmp_path, addresses=lambda: local(*LOOPBACK))
    assert by_check(check_listen(":0", alone, 5.0))["listen.address"].status is Status.WARNING


def test_an_address_of_another_machine_cannot_be_listened_on(tmp_path: Path) -> None:
    (found,) = check_listen("10.9.9.9:5556", machine(tmp_path), 5.0)
    assert found.status is Status.PROBLEM
    assert "10.9.9.9 is no address of this machine" in found.says


def test_a_loopback_listener_is_for_this_machine(tmp_path: Path) -> None:
    for text in ("127.0.0.1:0", "localhost:0"):
        found = by_check(check_listen(text, machine(tmp_path), 5.0))["listen.address"]
        assert found.status is Status.OK
        assert "from this machine only" in found.says


def test_a_link_local_address_is_no_address_for_peers(tmp_path: Path) -> None:
    found = next(iter(check_listen("[fe80::1]:0", machine(tmp_path), 5.0)))
    assert found.status is Status.WARNING
    assert "link-local" in found.says


def test_a_host_name_that_means_loopback_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def hosts(host: str | None, *rest: Any, **named: Any) -> Any:
        return real("127.0.1.1" if host == "decode-7" else host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", hosts)
    found = by_check(check_listen("decode-7:0", machine(tmp_path), 5.0))
    assert found["listen.address"].status is Status.WARNING
    assert "decode-7 means 127.0.1.1" in found["listen.address"].says
    assert found["listen.port"].status is Status.OK


def test_a_name_that_nobody_knows_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    (found,) = check_listen("nowhere:0", machine(tmp_path), 5.0)
    assert found.status is Status.PROBLEM
    assert "nowhere" in found.says


def test_a_silent_name_server_does_not_hold_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threading.Event()

    def slow(_: Address) -> list[Any]:
        threads.wait(10.0)
        return []

    monkeypatch.setattr("pdhandoff.cli.checks.addresses.resolve", slow)
    with pytest.raises(LocalError) as caught:
        resolve_within(Address("slow.example", 1), 0.01)
    threads.set()
    assert caught.value.code is ErrorCode.LINK_LOST
    assert "slow.example" in caught.value.reason


def test_T092_a_busy_port_is_named(tmp_path: Path) -> None:
    with listen(runtime_address.parse_address("127.0.0.1:0")) as sock:
        port = sock.getsockname()[1]
        found = by_check(check_listen(f"127.0.0.1:{port}", machine(tmp_path), 5.0))["listen.port"]
        assert found.status is Status.PROBLEM
        assert f"127.0.0.1:{port}" in found.says
        assert found.command == f"ss -ltnp 'sport = :{port}'"
        assert found.facts["port"] == port
    found = by_check(check_listen(f"127.0.0.1:{port}", machine(tmp_path), 5.0))["listen.port"]
    assert found.status is Status.OK

"""Python, pdhandoff, what it needs, and torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import pdhandoff
from pdhandoff.cli.checks.child import Child, ProbeEnded
from pdhandoff.cli.checks.finding import Finding, Status
from pdhandoff.cli.checks.system import System

__all__ = ["Torch", "check_torch", "check_versions", "find_torch"]

_NEWEST_PYTHON: Final = (3, 14)
_NEEDED: Final = {"msgspec": (0, 20), "cffi": (1, 17)}
_OLDEST_TORCH: Final = (2, 11)


class Torch(NamedTuple):
    """What a process of this machine gets when it imports torch."""

    version: str = ""
    "empty: none that can be imported"
    build: str = ""
    "`CPU`, or which kind of GPU it was built for"
    devices: tuple[str, ...] = ()
    "GPUs that it sees"
    why: str = ""
    "there is none"


def check_versions() -> Iterator[Finding]:
    """Of what every handoff needs."""
    python = platform.python_version()
    newer = sys.version_info[:2] > _NEWEST_PYTHON
    newest = ".".join(map(str, _NEWEST_PYTHON))
    yield Finding(
        check="python",
        status=Status.WARNING if newer else Status.OK,
        says=f"{platform.python_implementation()} {python} on {platform.system()} {platform.machine()}",
        advice=f"pdhandoff was tested with Python 3.11 to {newest}" if newer else "",
        facts={"version": python},
    )
    version = pdhandoff.__version__
    yield Finding(check="pdhandoff", status=Status.OK, says=f"pdhandoff {version}", facts={"version": version})
    for name, least in _NEEDED.items():
        yield _package(name, least)


def _package(name: str, least: tuple[int, ...]) -> Finding:
    wanted = ".".join(map(str, least))
    command = f"pip install '{name}>={wanted}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            check=name, status=Status.PROBLEM, says=f"{name} is not installed", command=command, facts={"version": None}
        )
    old = release(version) < least
    return Finding(
        check=name,
        status=Status.PROBLEM if old else Status.OK,
        says=f"{name} {version}" + (f" is older than {wanted}" if old else ""),
        command=command if old else "",
        facts={"version": version},
    )


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) of `2.13.0+cpu`."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def find_torch(within_s: float) -> Torch:
    """Import torch in a child, where a broken build or driver harms nobody."""
    spec = importlib.util.find_spec("torch")
    if spec is None:
        return Torch(why="is not installed")
    if spec.origin is None:
        return Torch(why="is hidden by a folder named torch on Python's path")
    try:
        with Child() as child:
            found: dict[str, Any] = child.ask("torch", within_s)
    except ProbeEnded as error:
        return Torch(why=f"cannot be imported: the process that tried {error}")
    if "broken" in found:
        return Torch(why=f"cannot be imported: {found['broken']}")
    cuda, hip = found["cuda"], found["hip"]
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    return Torch(version=found["version"], build=build, devices=tuple(found["devices"]))


def check_torch(torch: Torch, system: System) -> Finding:
    """What its build means here."""
    facts = {"version": torch.version or None, "build": torch.build or None, "devices": torch.devices}
    if torch.why:
        return Finding(
            check="torch",
            status=Status.WARNING,
            says=f"torch {torch.why}",
            advice="moving bytes works without; converting rows, the payload digest, GPU memory and the demo need it",
            command=f"pip install 'torch>={'.'.join(map(str, _OLDEST_TORCH))}'",
            facts=facts,
        )
    says = f"torch {torch.version}, {torch.build} build"
    status, advice = Status.OK, ""
    card = (system.root / "dev/nvidiactl").exists()
    if torch.devices:
        says += (
            f", sees {len(torch.devices)} GPU{'s' * (len(torch.devices) > 1)}: {', '.join(sorted(set(torch.devices)))}"
        )
    elif torch.build != "CPU":
        says += ", and sees no GPU"
        status, advice = Status.WARNING, "is a driver new enough for it installed, and CUDA_VISIBLE_DEVICES not empty?"
    elif card:
        says += ", on a host with an NVIDIA card"
        status, advice = Status.WARNING, "GPU memory needs a CUDA build of torch"
    if release(torch.version) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        status, advice = Status.WARNING, f"pdhandoff was tested with torch {oldest} and newer"
    return Finding(check="torch", status=status, says=says, advice=advice, facts=facts)

"""Settings of the allocator and of the process that break registration, or that make it fail later."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Final

from pdhandoff.cli.checks.finding import Finding, Status
from pdhandoff.cli.checks.system import System

__all__ = ["check_settings", "size"]

_ALLOCATOR: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"the first is torch's newer name for all of them"
_SHM_BYTES: Final = 256 << 20
"a container's default of 64 MiB is too little for shared-memory transports between several processes"
_LOCKED_BYTES: Final = 1 << 30
"a staging ring and a landing arena are larger than this in all but toy set-ups"
_DESCRIPTORS: Final = 1024
"every link is a descriptor, and transfer engines use several for each peer"


def size(nbytes: int) -> str:
    """Bytes for people: `64 MiB`."""
    value, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def check_settings(system: System) -> Iterator[Finding]:
    """All of them."""
    yield _allocator(system)
    yield _locked_memory(system)
    yield _shared_memory(system)
    yield _descriptors(system)


def _allocator(system: System) -> Finding:
    values = {name: system.environment[name] for name in _ALLOCATOR if name in system.environment}
    expandable = [name for name, value in values.items() if _expandable(value)]
    if not expandable:
        says = (
            f"{', '.join(values)} asks for no expandable segments" if values else "torch's allocator has its defaults"
        )
        return Finding(check="allocator", status=Status.OK, says=says, facts=dict(values))
    name = expandable[0]
    return Finding(
        check="allocator",
        status=Status.WARNING,
        says=f"{name} asks for expandable segments: such GPU memory cannot be shared with another process by CUDA IPC",
        advice="Mooncake's nvlink_intra cannot register it, and NIXL may fall back to slow paths; take the "
        "setting away, or keep the staging ring and the landing arena out of torch's allocator",
        command=f"unset {name}",
        facts=dict(values),
    )


def _expandable(value: str) -> bool:
    pairs = (part.partition(":") for part in value.split(","))
    return any(key.strip() == "expandable_segments" and on.strip().lower() == "true" for key, _, on in pairs)


def _locked_memory(system: System) -> Finding:
    soft, hard = system.limit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    devices = system.rdma_devices()
    says = "locked memory is unlimited" if unlimited else f"at most {size(soft)} of memory may be locked"
    facts = {"soft": None if unlimited else soft, "rdma_devices": devices}
    if not devices:
        return Finding(
            check="locked-memory",
            status=Status.OK,
            says=f"{says}; there is no RDMA device, for which it would have to be",
            facts=facts,
        )
    if unlimited or soft >= _LOCKED_BYTES:
        return Finding(check="locked-memory", status=Status.OK, says=f"{says} (for {', '.join(devices)})", facts=facts)
    raisable = hard == resource.RLIM_INFINITY or hard >= _LOCKED_BYTES
    return Finding(
        check="locked-memory",
        status=Status.PROBLEM,
        says=f"{says}, and registering memory with {', '.join(devices)} locks all of it: larger regions are refused",
        advice="raise the limit for the service that runs the engine: `LimitMEMLOCK=infinity` (systemd), "
        "`--ulimit memlock=-1` (docker), or in /etc/security/limits.conf",
        command="ulimit -l unlimited" if raisable else "",
        facts=facts,
    )


def _shared_memory(system: System) -> Finding:
    folder = system.root / "dev/shm"
    try:
        total, free = system.space(folder)
    except OSError as error:
        return Finding(
            check="shared-memory",
            status=Status.WARNING,
            says=f"there is no usable /dev/shm: {error.strerror}",
            advice="shared-memory transports of UCX need it; without them processes of one host talk over TCP",
            facts={"total": None, "free": None},
        )
    facts = {"total": total, "free": free}
    if free >= _SHM_BYTES:
        return Finding(check="shared-memory", status=Status.OK, says=f"{size(free)} are free in /dev/shm", facts=facts)
    return Finding(
        check="shared-memory",
        status=Status.WARNING,
        says=f"only {size(free)} of {size(total)} are free in /dev/shm: transports that use it may die when it is full",
        advice="give a container more with `--shm-size=1g`, or remove what has been left behind",
        command="ls -l /dev/shm" if total >= _SHM_BYTES else "mount -o remount,size=1g /dev/shm",
        facts=facts,
    )


def _descriptors(system: System) -> Finding:
    soft, hard = system.limit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    facts = {"soft": None if unlimited else soft}
    says = "open files are unlimited" if unlimited else f"at most {soft} files and sockets may be open"
    if unlimited or soft >= _DESCRIPTORS:
        return Finding(check="open-files", status=Status.OK, says=says, facts=facts)
    raisable = hard == resource.RLIM_INFINITY or hard >= _DESCRIPTORS
    return Finding(
        check="open-files",
        status=Status.WARNING,
        says=f"{says}: a consumer with many producers runs out of them",
        advice="raise it for the service that runs the engine",
        command=f"ulimit -n {65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)}" if raisable else "",
        facts=facts,
    )

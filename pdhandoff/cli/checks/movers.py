"""One mover: found, made, memory registered, and a page written from one process into another."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any, Final, NamedTuple, final

from pdhandoff.cli.checks.child import Child, ProbeEnded
from pdhandoff.cli.checks.finding import Fact, Finding, Status
from pdhandoff.cli.checks.versions import Torch
from pdhandoff.engines import registry

__all__ = ["Ask", "check_mover"]

_SETTLE_SHARE: Final = 0.8
"of a step's time is for the write itself, so that a mover that does not settle it can still say so"


class _Need(NamedTuple):
    """What a mover that comes with pdhandoff wants installed."""

    modules: tuple[str, ...]
    "any of them will do"
    wheels: tuple[str, ...]
    "that may have brought them"
    command: str
    "that installs one of them"
    packages: tuple[str, ...] = ()
    "of Debian"


_NEEDS: Final[Mapping[str, _Need]] = {
    "nixl": _Need(
        ("nixl_cu13", "nixl_cu12", "nixl"), ("nixl-cu13", "nixl-cu12", "nixl"), "pip install 'pdhandoff[nixl]'"
    ),
    "mooncake": _Need(
        ("mooncake",),
        tuple(f"mooncake-transfer-engine{kind}" for kind in ("-non-cuda", "-cuda13", "")),
        "pip install 'pdhandoff[mooncake]'",
        ("libibverbs1", "librdmacm1", "libnuma1", "libcurl4"),
    ),
}
_MISSING_LIBRARY: Final = re.compile(r"\blib[\w+.-]+\.so[.\d]*: cannot open shared object file")


@final
class Ask(NamedTuple):
    """What is to be checked, and how."""

    name: str
    "in the registry, or `module:factory`"
    by_name: bool
    "the caller asked for this one: that it is not installed is a problem"
    options: Mapping[str, object]
    within_s: float
    "for each step"
    torch: Torch


class _Stop(Exception):
    """This mover goes no further; the finding says why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.says)
        self.finding = finding


class _Sides(NamedTuple):
    """The two processes."""

    writer: Child
    receiver: Child


def check_mover(ask: Ask) -> Iterator[Finding]:
    """All that can be said of it; stops at the first step that fails, for nothing after it can work."""
    missing = _missing(ask)
    if missing is not None:
        yield missing
        return
    try:
        with ExitStack() as stack:
            sides = _Sides(stack.enter_context(Child()), stack.enter_context(Child()))
            opened = _open(ask, sides)
            yield _made(ask, opened)
            yield _capabilities(ask, opened)
            yield from _memory(ask, sides, "cpu")
            yield from _gpu(ask, sides, opened)
    except _Stop as stop:
        yield stop.finding


def _id(ask: Ask, *parts: str) -> str:
    return ".".join(("mover", ask.name, *parts))


def _missing(ask: Ask) -> Finding | None:
    """The finding for a mover that is not there at all."""
    if ":" not in ask.name and ask.name not in registry.known():
        return Finding(
            check=_id(ask, "made"),
            status=Status.PROBLEM,
            says=f"there is no mover {ask.name!r}",
            advice=f"known are {', '.join(registry.known())}; a package adds one by an entry point in the group "
            f"{registry.GROUP!r}; module:factory names one that is not declared",
        )
    need = _NEEDS.get(ask.name)
    if need is None or any(importlib.util.find_spec(module) is not None for module in need.modules):
        return None
    return Finding(
        check=_id(ask, "made"),
        status=Status.PROBLEM if ask.by_name else Status.SKIPPED,
        says=f"{ask.name} is not installed: there is no module {' or '.join(need.modules)}",
        advice="" if ask.by_name else "install it only if you mean to use it",
        command=need.command,
    )


def _step(
    ask: Ask, check: str, who: str, child: Child, verb: str, *, advice: str = "", **arguments: Any
) -> dict[str, Any]:
    """Let a child do something. Raises _Stop with the finding for whatever keeps it from doing so."""
    try:
        answer = child.ask(verb, ask.within_s, **arguments)
    except ProbeEnded as error:
        says = f"the process that was to {who} {error}"
        raise _Stop(Finding(check=check, status=Status.PROBLEM, says=says, advice=advice)) from None
    if "refused" in answer:
        says = str(answer["refused"])
        facts: dict[str, Fact] = {"code": answer["code"]}
        raise _Stop(Finding(check=check, status=Status.PROBLEM, says=says, advice=advice, facts=facts))
    return answer


def _open(ask: Ask, sides: _Sides) -> dict[str, Any]:
    check = _id(ask, "made")
    arguments: dict[str, Any] = {"mover": ask.name, "options": dict(ask.options)}
    try:
        _step(ask, check, "make the mover", sides.receiver, "open", **arguments)
        return _step(ask, check, "make a second one", sides.writer, "open", **arguments)
    except _Stop as stop:
        raise _Stop(_with_command(ask, stop.finding)) from None


def _with_command(ask: Ask, finding: Finding) -> Finding:
    """The command that mends a mover that cannot be made, where one is known."""
    need = _NEEDS.get(ask.name)
    library = _MISSING_LIBRARY.search(finding.says)
    command = ""
    advice = "until then no engine that is configured for it becomes ready"
    if library is not None and need is not None and need.packages:
        command = f"apt-get install {' '.join(need.packages)}"
    elif library is not None:
        advice = f"install the system package that has {library[0].partition(':')[0]}"
    return Finding(
        check=finding.check,
        status=finding.status,
        says=finding.says,
        advice=advice,
        command=command,
        facts=finding.facts,
    )


def _made(ask: Ask, opened: Mapping[str, Any]) -> Finding:
    name = opened["name"]
    if ":" not in ask.name and name != ask.name:
        says = f"the mover that is declared as {ask.name} calls itself {name}: both sides compare that name"
        return Finding(check=_id(ask, "made"), status=Status.WARNING, says=says, facts={"name": name, "wheels": ()})
    wheels = _wheels(ask.name)
    by = f" ({', '.join(wheels)})" if wheels else ""
    says = f"can be loaded and made{by}, moves {' and '.join(opened['memory_kinds'])} memory"
    return Finding(check=_id(ask, "made"), status=Status.OK, says=says, facts={"name": name, "wheels": wheels})


def _wheels(name: str) -> tuple[str, ...]:
    """What is installed of a mover's wheels, with versions."""
    found = []
    for wheel in _NEEDS[name].wheels if name in _NEEDS else ():
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{wheel} {importlib.metadata.version(wheel)}")
    return tuple(found)


def _capabilities(ask: Ask, opened: Mapping[str, Any]) -> Finding:
    """What its proofs mean for memory whose writer does not answer."""
    quiesce, fence = opened["quiesce"], opened["fence"]
    can = [name for name in ("quiesce", "fence", "reports_peer_death", "thread_safe") if opened[name]]
    says = f"promises {', '.join(can)}" if can else "promises neither quiesce nor fence"
    if fence and quiesce:
        advice = "memory of a writer that ended is free once that is proven; of one that does not answer, once fenced"
    elif fence:
        advice = "the runtime keeps memory of a writer that does not answer in quarantine until it is fenced"
    elif quiesce:
        advice = (
            "the runtime keeps memory of a writer in quarantine until its end is proven; while such a process lives "
            "and does not answer, that memory is lost: end the process"
        )
    else:
        advice = (
            "the runtime keeps memory of a writer that does not answer in quarantine for good: watch the quarantined "
            "bytes, and restart the consumer when they grow"
        )
    facts: dict[str, Fact] = {
        name: opened[name]
        for name in ("quiesce", "fence", "reports_peer_death", "thread_safe", "registers_any_memory", "alignment")
    }
    return Finding(
        check=_id(ask, "capabilities"),
        status=Status.OK if fence else Status.WARNING,
        says=says,
        advice=advice,
        facts=facts,
    )


def _gpu(ask: Ask, sides: _Sides, opened: Mapping[str, Any]) -> Iterator[Finding]:
    check = _id(ask, "register", "cuda")
    if not ask.torch.devices:
        says = "GPU memory was not tried: torch sees no GPU here"
        yield Finding(check=check, status=Status.SKIPPED, says=says)
    elif "cuda" not in opened["memory_kinds"]:
        says = f"{ask.name} moves no GPU memory here: caches in GPU memory have to be staged through the host"
        yield Finding(check=check, status=Status.WARNING, says=says)
    else:
        yield from _memory(ask, sides, "cuda")


def _memory(ask: Ask, sides: _Sides, kind: str) -> Iterator[Finding]:
    """Register, write and compare in one kind of memory."""
    check = _id(ask, "register", kind)
    advice = f"not ready: no handoff in {kind} memory can work. See the findings on the allocator and on locked memory"
    nbytes = 0
    for side in sides:
        answer = _step(ask, check, "register memory", side, "register", advice=advice, kind=kind, device=0)
        nbytes = answer["nbytes"]
    says = f"{nbytes} bytes of {kind} memory were registered in two processes"
    yield Finding(check=check, status=Status.OK, says=says, facts={"nbytes": nbytes})
    yield _probe_write(ask, sides, kind)


def _probe_write(ask: Ask, sides: _Sides, kind: str) -> Finding:
    """A page, twice: the first write connects, the second shows what is left of that."""
    check = _id(ask, "write", kind)
    advice = f"not ready: a handoff in {kind} memory would fail in the same way"
    grant = _step(ask, check, "grant a page", sides.receiver, "describe", advice=advice, kind=kind)
    _step(ask, check, "connect", sides.writer, "connect", advice=advice, description=grant["description"])
    elapsed_s: list[float] = []
    transports: list[str] = []
    for seed in (1, 2):
        written = _step(
            ask,
            check,
            "write a page",
            sides.writer,
            "write",
            advice=advice,
            kind=kind,
            destination=grant["address"],
            seed=seed,
            settle_s=ask.within_s * _SETTLE_SHARE,
        )
        if written["state"] != "done":
            raise _Stop(_unwritten(ask, check, written, advice))
        _same(ask, check, kind, seed, sides)
        elapsed_s.append(written["elapsed_s"])
        transports = written["transports"]
    return _landed(ask, check, kind, elapsed_s, transports)


def _unwritten(ask: Ask, check: str, written: Mapping[str, Any], advice: str) -> Finding:
    waited = (
        f"a page was not written within {ask.within_s * _SETTLE_SHARE:g} s: the mover still says {written['state']}"
    )
    failed = f"writing a page failed: {written['reason']}"
    says = waited if written["state"] == "pending" else failed
    return Finding(check=check, status=Status.PROBLEM, says=says, advice=advice)


def _same(ask: Ask, check: str, kind: str, seed: int, sides: _Sides) -> None:
    """Compare what landed, byte for byte. Raises _Stop."""
    found = _step(ask, check, "compare a page", sides.receiver, "compare", kind=kind, seed=seed)
    if found["wrong"]:
        says = (
            f"the mover said done, and {found['wrong']} of {found['length']} bytes are wrong, the first at "
            f"{found['first']}"
        )
    elif found["outside"]:
        says = f"the page landed, and {found['outside']} bytes beside it, outside the grant, were changed too"
    else:
        return
    facts: dict[str, Fact] = {name: found[name] for name in ("wrong", "first", "outside")}
    raise _Stop(
        Finding(
            check=check,
            status=Status.PROBLEM,
            says=says,
            advice="not ready: do not use this mover here, it would hand off wrong state. "
            "`pdhandoff conformance` says which rule it breaks",
            facts=facts,
        )
    )


def _landed(ask: Ask, check: str, kind: str, elapsed_s: list[float], transports: list[str]) -> Finding:
    first, then = elapsed_s
    says = f"a page landed byte for byte in another process: {first * 1e3:.3g} ms at first, then {then * 1e3:.3g} ms"
    says += f", over a connection by {', '.join(transports)}" if transports else ""
    slow = kind == "cuda" and bool(transports) and not any("cuda" in each or "rc" in each for each in transports)
    return Finding(
        check=check,
        status=Status.WARNING if slow else Status.OK,
        says=says,
        advice="GPU memory travels through the host: is CUDA IPC excluded, or is this memory that it cannot share?"
        if slow
        else "",
        facts={
            "first_s": first,
            "then_s": then,
            "transports": tuple(transports),
            "mover": ask.name,
        },
    )

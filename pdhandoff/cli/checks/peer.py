"""A running consumer, asked over its control port, as a producer would ask it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, final

from pdhandoff.cli.checks.addresses import resolve_within
from pdhandoff.cli.checks.child import Child, ProbeEnded
from pdhandoff.cli.checks.finding import Fact, Finding, Status
from pdhandoff.cli.checks.link import Meeting, meet
from pdhandoff.errors import ErrorCode, LayoutError, LocalError, RemoteError
from pdhandoff.layouts import Layout, encode_layout
from pdhandoff.limits import DEFAULT_LIMITS
from pdhandoff.protocol.messages import Welcome
from pdhandoff.runtime.address import Address, Resolved, parse_address
from pdhandoff.runtime.meeting import decode_layouts

__all__ = ["PeerAsk", "check_peer"]

_NAME: Final = "pdhandoff doctor"


@final
class PeerAsk(NamedTuple):
    """Whom to ask, and as whom."""

    address: str
    mover: str | None
    "that this side would use; None: whichever the peer has"
    options: dict[str, object]
    "of that mover"
    secret: bytes | None
    within_s: float


def check_peer(ask: PeerAsk) -> Iterator[Finding]:
    """Its version, mover and layouts; then the round trip as a producer of its own layout, or the refusal.

    Raises LocalError (CONFIG) when it is no address.
    """
    address = parse_address(ask.address)
    try:
        where, first = _reach(ask, resolve_within(address, ask.within_s), Welcome(name=_NAME, mover=ask.mover or ""))
    except LocalError as error:
        command = f"ss -ltn 'sport = :{address.port}'"
        advice = "is the consumer running, and does it listen on this address? The command, on its host, tells"
        yield Finding(check="peer.reached", status=Status.PROBLEM, says=error.reason, advice=advice, command=command)
        return
    if first.opened is None:
        yield _unopened(address, first)
        return
    yield _shaken(address, first)
    try:
        layouts = decode_layouts(first.opened.welcome.consumes, DEFAULT_LIMITS)
    except (RemoteError, LayoutError) as error:
        yield Finding(check="peer.layouts", status=Status.PROBLEM, says=error.reason)
        return
    yield _layouts(layouts)
    if layouts:
        yield _as_producer(ask, where, first.opened.welcome.mover, layouts)


def _reach(ask: PeerAsk, found: Sequence[Resolved], welcome: Welcome) -> tuple[Resolved, Meeting]:
    """The first address of a name that answers. Raises LocalError."""
    failures: list[str] = []
    for where in found:
        try:
            return where, meet(where, welcome, secret=ask.secret, within_s=ask.within_s)
        except LocalError as error:
            failures.append(error.reason)
    raise LocalError(ErrorCode.LINK_LOST, "; ".join(dict.fromkeys(failures)))


def _version(meeting: Meeting) -> str | None:
    return None if meeting.hello is None else f"{meeting.hello.major}.{meeting.hello.minor}"


def _unopened(address: Address, meeting: Meeting) -> Finding:
    """The handshake did not come to its end."""
    ended = meeting.ended
    reason, code = ("it ended without a word", 0) if ended is None else (ended.reason, int(ended.code))
    if meeting.by_peer:
        says = f"{address} refused: {reason}"
    else:
        says = f"{address} was connected to, and the handshake failed: {reason}"
    advice = ""
    if code == ErrorCode.AUTHENTICATION:
        advice = "give the secret by --secret-file"
    elif meeting.hello is None and not meeting.by_peer:
        advice = "does something else than a pdhandoff consumer listen there, or one that wants an encrypted link?"
    facts: dict[str, Fact] = {"protocol": _version(meeting), "code": code, "refused": meeting.by_peer}
    return Finding(check="peer.handshake", status=Status.PROBLEM, says=says, advice=advice, facts=facts)


def _shaken(address: Address, meeting: Meeting) -> Finding:
    welcome = meeting.opened.welcome if meeting.opened is not None else Welcome(mover="")
    version = _version(meeting)
    says = f"{address} is {welcome.name or 'without a name'}, speaks protocol {version}, moves bytes by {welcome.mover}"
    facts: dict[str, Fact] = {
        "name": welcome.name,
        "protocol": version,
        "mover": welcome.mover,
        "connect_s": meeting.connect_s,
        "liveness_s": welcome.liveness_ms / 1000,
    }
    return Finding(check="peer.handshake", status=Status.OK, says=says, facts=facts)


def _layouts(layouts: Sequence[Layout]) -> Finding:
    if not layouts:
        says = "it takes no handoffs: it is a producer, or another check"
        return Finding(check="peer.layouts", status=Status.WARNING, says=says, facts={"layouts": ()})
    texts = []
    for layout in layouts:
        names = ", ".join(f"{component.name} of {len(component.layers)} layers" for component in layout.components)
        texts.append(f"{layout.name} ({names})")
    says = f"it takes {'; '.join(dict.fromkeys(texts))}"
    facts: dict[str, Fact] = {"layouts": tuple(layout.name for layout in layouts), "ranks": len(layouts)}
    return Finding(check="peer.layouts", status=Status.OK, says=says, facts=facts)


def _as_producer(ask: PeerAsk, where: Resolved, theirs: str, layouts: Sequence[Layout]) -> Finding:
    """Meet it again as a producer of exactly what it holds: what is refused now has nothing to do with layouts."""
    mover = ask.mover or theirs
    try:
        with Child() as child:
            opened = child.ask("open", ask.within_s, mover=mover, options=ask.options)
            identity = opened if "refused" in opened else child.ask("identity", ask.within_s)
            if "refused" in identity:
                says = f"it moves bytes by {theirs}, and {mover} cannot be used here: {identity['refused']}"
                return Finding(check="peer.producer", status=Status.PROBLEM, says=says)
            welcome = Welcome(
                name=_NAME,
                mover=str(opened["name"]),
                description=bytes.fromhex(identity["description"]),
                produces=encode_layout(layouts[0]),
                shards=max(1, len(layouts)),
            )
            meeting = meet(where, welcome, secret=ask.secret, within_s=ask.within_s)
    except ProbeEnded as error:
        says = f"it moves bytes by {theirs}, and the process that was to make {mover} here {error}"
        return Finding(check="peer.producer", status=Status.PROBLEM, says=says)
    except LocalError as error:
        return Finding(check="peer.producer", status=Status.PROBLEM, says=f"it was there a moment ago: {error.reason}")
    return _answered(meeting)


def _answered(meeting: Meeting) -> Finding:
    if meeting.ping_s is not None:
        says = f"a producer with this mover is let in; round trip {meeting.ping_s * 1e3:.3g} ms"
        facts: dict[str, Fact] = {"round_trip_s": meeting.ping_s}
        return Finding(check="peer.producer", status=Status.OK, says=says, facts=facts)
    reason = "no answer" if meeting.ended is None else meeting.ended.reason
    code = 0 if meeting.ended is None else int(meeting.ended.code)
    says = f"a producer with this mover is refused: {reason}" if meeting.by_peer else f"the link ended: {reason}"
    return Finding(check="peer.producer", status=Status.PROBLEM, says=says, facts={"code": code})

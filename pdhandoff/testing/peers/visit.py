"""What checks of a consumer work with: connections to it, offers, grants, and bounded waits for its answers."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar, final, overload

import msgspec

from pdhandoff.errors import ErrorCode, LocalError, PlanError
from pdhandoff.ids import HandoffId, Incarnation
from pdhandoff.limits import DEFAULT_LIMITS
from pdhandoff.protocol.attachments import attach_int
from pdhandoff.protocol.link import Link, Side
from pdhandoff.protocol.manifest import Manifest
from pdhandoff.protocol.messages import Attachment, Bye, Cancel, Grant, Offer, Ping, Pong, Refuse, Renew, Welcome
from pdhandoff.runtime.address import Resolved
from pdhandoff.runtime.channel import Channel, PlainChannel, TlsChannel
from pdhandoff.runtime.tls import Tls
from pdhandoff.testing.peers.handoffs import Announced, SkipRule
from pdhandoff.testing.peers.line import Line
from pdhandoff.testing.peers.patience import Patience
from pdhandoff.testing.peers.rows import Rows
from pdhandoff.testing.rule import Violation, require

__all__ = ["Held", "Target", "Visit", "name_of"]

M = TypeVar("M")

_NAME: Final = "pdhandoff conformance"
_FIRST_PING: Final = 1 << 32
"numbers that a link's own heartbeats do not reach"
_MOST_TOKENS: Final = 1 << 20
"of the prompts that fill the consumer's memory"
_IDS_AT_ONCE: Final = 8


def name_of(code: int) -> str:
    """An error code, for people."""
    return ErrorCode(code).name if code in set(ErrorCode) else f"code {code}"


@final
class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The consumer under check, as its first handshake showed it."""

    host: str
    where: tuple[Resolved, ...]
    secret: bytes | None
    tls: Tls | None
    welcome: Welcome
    "what it says of itself"
    produces: bytes
    "the layout that is handed off: its own, encoded"
    template: Manifest
    "of a prompt of one token"


@final
class Held:
    """A grant, and what was offered for it."""

    def __init__(self, line: Line, offer: Offer, grant: Grant, manifest: Manifest) -> None:
        self.line = line
        self.offer = offer
        self.grant = grant
        self.manifest = manifest
        "as granted"
        self.handoff = HandoffId(offer.handoff)
        self.ready = False
        "the consumer has said READY"
        self.over = False
        "nothing has to be done about it any more"
        self.silent = False
        "say no RENEW"
        self.renew_at = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of its extents."""
        return sum(length for rank in self.grant.ranks for _, length in rank.extents)


@final
class Visit:
    """One run's connections to one consumer. One thread.

    Args:
        target: the consumer.
        rows: what to hand off, and the mover.
        announced: ids that may be offered.
        patience: sizes and times.
        attachments: named integers that go with every offer.
    """

    def __init__(
        self,
        target: Target,
        rows: Rows,
        announced: Announced,
        patience: Patience,
        attachments: Sequence[tuple[str, int]],
    ) -> None:
        self.target: Final = target
        self.rows: Final = rows
        self.announced: Final = announced
        self.patience: Final = patience
        self.attachments: Final[tuple[Attachment, ...]] = tuple(attach_int(name, value) for name, value in attachments)
        self.capacity: int | None = None
        "bytes that could be granted when the run began; None: not known"
        self.new_mover: Callable[[], Any] = lambda: None
        "another mover of the same kind"
        self._lines: list[Line] = []
        self._held: list[Held] = []
        self._taken: set[tuple[int, int]] = set()
        self._pings = _FIRST_PING
        self._closing: list[Any] = []

    # ---- connections

    def dial(
        self,
        *,
        by_hand: bool = False,
        incarnation: Incarnation | None = None,
        identity: bytes | None = None,
        **changes: Any,
    ) -> Line:
        """Connect.

        Args:
            by_hand: say nothing by itself, neither the handshake.
            incarnation: as whom; None: somebody new.
            identity: description of another mover than the run's.
            changes: of the WELCOME.

        Raises Violation when nobody takes the connection.
        """
        who = incarnation or Incarnation.mint()
        welcome = msgspec.structs.replace(self.welcome(identity), **changes)
        link = None
        if not by_hand:
            link = Link(
                Side.DIALLER,
                now=time.monotonic(),
                incarnation=who,
                nonce=os.urandom(16),
                welcome=welcome,
                secret=self.target.secret,
            )
        line = Line(self._connect(), self._channel(), link, who, self.patience.answer_s)
        self._lines.append(line)
        return line

    def open(self, **how: Any) -> Line:
        """Connect and shake hands. Raises Violation when the consumer does not let a proper producer in."""
        line = self.dial(**how)
        self.until(lambda: line.opened is not None or line.ended or bool(line.fault), "the handshake", lines=[line])
        require(line.opened is not None, f"a proper producer was not let in: {self.last_words(line)}")
        return line

    def welcome(self, identity: bytes | None = None) -> Welcome:
        """What a producer of the consumer's own layout says of itself."""
        return Welcome(
            name=_NAME,
            mover=self.target.welcome.mover,
            description=self.rows.identity if identity is None else identity,
            produces=self.target.produces,
        )

    @staticmethod
    def last_words(line: Line) -> str:
        """Why a connection went wrong, for a sentence."""
        bye = line.bye
        if bye is not None:
            return f"{name_of(bye.code)}: {bye.reason}"
        return line.fault or ("it closed the connection without a word" if line.ended else "it says nothing")

    # ---- waits

    def pump(self, within_s: float) -> None:
        """Let everything go on, until something comes or the time is over."""
        now = time.monotonic()
        for held in self._held:
            if (
                not (held.over or held.silent or held.ready or held.line.ended or held.line.muted)
                and held.renew_at <= now
            ):
                held.renew_at = now + held.grant.lease_ms / 3000
                held.line.say(self.renewal(held))
        for line in self._lines:
            line.tick()
        with selectors.DefaultSelector() as selector:
            for line in self._lines:
                if not line.ended:
                    selector.register(line.sock, selectors.EVENT_READ, line)
            for key, _ in selector.select(max(0.0, min(within_s, 0.05))):
                key.data.receive()

    def until(
        self, holds: Callable[[], bool], what: str, *, within_s: float | None = None, lines: Iterable[Line] = ()
    ) -> None:
        """Wait. Raises Violation when it takes too long, or one of the lines that it needs has ended."""
        limit = self.patience.answer_s if within_s is None else within_s
        deadline = time.monotonic() + limit
        needed = list(lines)
        while not holds():
            for line in needed:
                if line.ended or line.fault:
                    if holds():
                        return
                    raise Violation(f"{what} never came, and the link has ended: {self.last_words(line)}")
            if time.monotonic() > deadline:
                raise Violation(f"{what} did not come within {limit:g} s")
            self.pump(deadline - time.monotonic())

    def quiet(self, seconds: float | None = None) -> None:
        """Listen for a while."""
        deadline = time.monotonic() + (self.patience.quiet_s if seconds is None else seconds)
        while (left := deadline - time.monotonic()) > 0:
            self.pump(left)

    @overload
    def expect(
        self,
        line: Line,
        kind: type[M],
        what: str,
        match: Callable[[M], bool] = ...,
        within_s: float | None = None,
    ) -> M: ...

    @overload
    def expect(
        self,
        line: Line,
        kind: tuple[type, ...],
        what: str,
        match: Callable[[Any], bool] = ...,
        within_s: float | None = None,
    ) -> Any: ...

    def expect(
        self,
        line: Line,
        kind: type | tuple[type, ...],
        what: str,
        match: Callable[[Any], bool] = lambda _: True,
        within_s: float | None = None,
    ) -> Any:
        """The first message of a kind that was not given out before. Raises Violation when none comes."""
        found: list[Any] = []

        def look() -> bool:
            for number, message in enumerate(line.heard):
                key = (id(line), number)
                if key not in self._taken and isinstance(message, kind) and match(message):
                    self._taken.add(key)
                    found.append(message)
                    return True
            return False

        self.until(look, what, within_s=within_s, lines=[line])
        return found[0]

    def ending(self, line: Line, what: str, within_s: float | None = None) -> Bye:
        """How the consumer ends a connection that it must end. Raises Violation when it does not, or not with a BYE."""
        self.until(lambda: line.ended, f"the end of a connection after {what}", within_s=within_s)
        bye = line.bye
        if bye is None:
            raise Violation(f"after {what} the connection ended without a BYE that says why")
        require(bye.code and bye.reason, f"after {what} the BYE has no code, or no reason")
        return bye

    def alive(self, line: Line, after: str) -> None:
        """Raises Violation unless a link answers a PING."""
        self._pings += 1
        number = self._pings
        line.say(Ping(number=number))
        self.expect(line, Pong, f"the answer to a PING after {after}", lambda pong: pong.number == number)

    # ---- handoffs

    def offer_of(self, handoff: HandoffId, tokens: int | None = None, **changes: Any) -> Offer:
        """An offer that is in order, but for the changes."""
        manifest = msgspec.structs.replace(
            self.target.template, prompt_tokens=self.patience.tokens if tokens is None else tokens
        )
        offer = Offer(handoff=bytes(handoff), manifest=manifest, attachments=self.attachments)
        return msgspec.structs.replace(offer, **changes)

    def answer(self, line: Line, handoff: HandoffId, what: str, within_s: float | None = None) -> Grant | Refuse:
        """GRANT or REFUSE for an offer, whichever comes first."""
        message: Grant | Refuse = self.expect(
            line, (Grant, Refuse), what, lambda message: message.handoff == handoff, within_s
        )
        return message

    def hold(self, line: Line, offer: Offer, grant: Grant) -> Held:
        """Remember a grant: it is renewed, and given back when the check ends."""
        try:
            manifest = offer.manifest.starting_at(grant.start_token)
        except PlanError as error:
            raise Violation(f"the GRANT starts outside the prompt: {error.reason}") from error
        held = Held(line, offer, grant, manifest)
        self._held.append(held)
        return held

    def granted(self, line: Line, handoff: HandoffId | None = None, tokens: int | None = None, **changes: Any) -> Held:
        """Offer, and take the grant. Raises Violation when it is refused."""
        chosen = self.announced.take()[0] if handoff is None else handoff
        patient = int(self.patience.answer_s * 1000)
        offer = self.offer_of(chosen, tokens, **{"queue_ms": patient, **changes})
        line.say(offer)
        answer = self.answer(line, chosen, "an answer to an offer", 2 * self.patience.answer_s)
        if isinstance(answer, Refuse):
            raise Violation(f"an offer that is in order was refused: {name_of(answer.code)}: {answer.reason}")
        return self.hold(line, offer, answer)

    def held_of(self, line: Line) -> list[Held]:
        """The grants of one connection."""
        return [held for held in self._held if held.line is line]

    @staticmethod
    def renewal(held: Held) -> Renew:
        """A sign of life."""
        return Renew(handoff=held.offer.handoff, generation=held.grant.generation, shard=held.grant.shard)

    def give_up(self, held: Held, *, drained: bool = True) -> None:
        """End a handoff. Its writer has ended unless `drained` is False."""
        held.over = drained
        held.line.say(
            Cancel(
                handoff=held.offer.handoff,
                generation=held.grant.generation,
                shard=held.grant.shard,
                reason="the check is over",
                drained=drained,
            )
        )

    def fill(self, line: Line) -> list[Held]:
        """Take all memory that can be granted, the largest grant first.

        Raises SkipRule when that is too much, or there are too few ids.
        """
        self.announced.need_endless()
        held: list[Held] = []
        ids: list[HandoffId] = []
        tokens = min(_MOST_TOKENS, DEFAULT_LIMITS.max_prompt_tokens)
        while tokens >= 1:
            if len(held) >= self.patience.full_grants:
                for each in held:
                    self.give_up(each)
                raise SkipRule(f"{len(held)} grants do not fill the consumer's memory: check one with less")
            ids = ids or self.announced.take(_IDS_AT_ONCE)
            offer = self.offer_of(ids.pop(), tokens)
            line.say(offer)
            answer = self.answer(line, HandoffId(offer.handoff), "an answer to an offer")
            if isinstance(answer, Grant):
                held.append(self.hold(line, offer, answer))
            elif answer.code in {ErrorCode.TOO_LARGE, ErrorCode.BUSY}:
                tokens //= 2
            else:
                raise Violation(f"an offer that is in order was refused: {name_of(answer.code)}: {answer.reason}")
        return held

    # ---- the end of a check

    def close_later(self, mover: Any) -> None:
        """A mover of one check."""
        self._closing.append(mover)

    def tidy(self) -> None:
        """Give everything back and hang up, whatever went wrong before."""
        for held in self._held:
            # where nobody claims what has arrived, its memory would be kept for minutes
            if not held.over and (not held.ready or self.announced.accepts):
                with contextlib.suppress(Violation):
                    self._return(held)
        for line in self._lines:
            if not line.ended:
                with contextlib.suppress(Violation):
                    if line.opened is not None:
                        self.alive(line, "the check")
                line.say(Bye(reason="the check is over"))
            line.hang_up()
        self._lines.clear()
        self._held.clear()
        self._taken.clear()
        movers, self._closing = self._closing, []
        for mover in movers:
            mover.close()

    # ---- inside

    def _return(self, held: Held) -> None:
        """Over its own link, or over a new one of the same producer."""
        if held.line.ended or held.line.muted:
            held.line = self.open(incarnation=held.line.incarnation)
        self.give_up(held)

    def _connect(self) -> socket.socket:
        problem = "it has no address"
        for family, where in self.target.where:
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.settimeout(self.patience.answer_s)
            try:
                sock.connect(where)
            except OSError as error:
                sock.close()
                problem = error.strerror or str(error)
            else:
                return sock
        raise Violation(f"the consumer takes no connection: {problem}")

    def _channel(self) -> Channel:
        if self.target.tls is None:
            return PlainChannel()
        try:
            return TlsChannel(self.target.tls, Side.DIALLER, host=self.target.host)
        except LocalError as error:
            raise Violation(error.reason) from error

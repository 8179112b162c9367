"""One link between two endpoints: handshake in two phases, liveness, and nothing of handoffs.

Phase one exchanges HELLO (versions, incarnations, nonces) and, with a shared secret, PROOF. Phase two exchanges
WELCOME. Nothing about memory or layouts is disclosed before the peer has proven itself. Roles belong to handoffs: a
link carries them both ways, whoever dialled.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from typing import Final, final

import msgspec

from pdhandoff.errors import ErrorCode, LocalError, RemoteError
from pdhandoff.ids import Incarnation
from pdhandoff.limits import DEFAULT_LIMITS, Limits
from pdhandoff.protocol.codec import LENGTH_BYTES, FrameDecoder, UnknownMessage, encode_message, version_mismatch
from pdhandoff.protocol.messages import (
    AUTH_HMAC,
    AUTH_NONE,
    MAGIC,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Bye,
    Hello,
    Message,
    Ping,
    Pong,
    Proof,
    Welcome,
)
from pdhandoff.protocol.table import Machine, Name, Table

__all__ = [
    "TABLE",
    "Link",
    "LinkClosed",
    "LinkEvent",
    "LinkInput",
    "LinkOpened",
    "LinkState",
    "LinkStatistics",
    "MessageReceived",
    "Side",
]


@final
class Side(enum.Enum):
    """Who opened the connection."""

    DIALLER = "dialler"
    LISTENER = "listener"


@final
class LinkState(Name):
    """Where the handshake stands."""

    HELLO = "hello"  # waits for the peer's HELLO
    PROOF = "proof"  # waits for the peer's PROOF
    WELCOME = "welcome"  # waits for the peer's WELCOME
    OPEN = "open"
    CLOSED = "closed"


@final
class LinkInput(Name):
    """What can happen to a link."""

    HELLO_SECRET = "hello, secret in use"  # noqa: S105 - the name of an input
    HELLO_PLAIN = "hello, no secret"
    PROOF_RIGHT = "right proof"
    WELCOME = "welcome"
    CLOSE = "closed, lost, silent or refused"


MIN_HEARTBEAT_S: Final = 0.05
"PINGs are sent no more often, however impatient the peer"

_S, _I = LinkState, LinkInput

TABLE: Final = Table(
    "link",
    initial=_S.HELLO,
    terminal=(_S.CLOSED,),
    rows=(
        (_S.HELLO, _I.HELLO_SECRET, _S.PROOF, "prove"),
        (_S.HELLO, _I.HELLO_PLAIN, _S.WELCOME, "welcome"),
        (_S.PROOF, _I.PROOF_RIGHT, _S.WELCOME, "welcome"),
        (_S.WELCOME, _I.WELCOME, _S.OPEN, "open"),
        (_S.HELLO, _I.CLOSE, _S.CLOSED, "close"),
        (_S.PROOF, _I.CLOSE, _S.CLOSED, "close"),
        (_S.WELCOME, _I.CLOSE, _S.CLOSED, "close"),
        (_S.OPEN, _I.CLOSE, _S.CLOSED, "close"),
    ),
)


@final
class LinkOpened(msgspec.Struct, frozen=True, kw_only=True):
    """The handshake is complete."""

    incarnation: Incarnation
    welcome: Welcome
    digest: bytes
    "of the peer's layout, from its HELLO; empty with a secret"


@final
class MessageReceived(msgspec.Struct, frozen=True, kw_only=True):
    """A message for the handoffs on this link."""

    message: Message


@final
class LinkClosed(msgspec.Struct, frozen=True, kw_only=True):
    """The link has ended; nothing more will come of it. Says nothing about writes in flight."""

    code: int
    reason: str


LinkEvent = LinkOpened | MessageReceived | LinkClosed


@final
class LinkStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one link."""

    received: int
    sent: int
    unknown: int
    "messages of types this version does not know"


@final
class Link:
    """The sans-IO half of a connection: bytes and times in, events and bytes out.

    `secret` None means that no authentication is wanted, and then the peer must not want any either.
    """

    def __init__(
        self,
        side: Side,
        *,
        now: float,
        incarnation: Incarnation,
        nonce: bytes,
        welcome: Welcome,
        secret: bytes | None = None,
        digest: bytes = b"",
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.side = side
        self._limits = limits
        self._machine = Machine(TABLE)
        self._secret = secret
        self._welcome = welcome
        self._hello = encode_message(
            Hello(
                magic=MAGIC,
                major=PROTOCOL_MAJOR,
                minor=PROTOCOL_MINOR,
                incarnation=incarnation,
                nonce=nonce,
                authentication=AUTH_NONE if secret is None else AUTH_HMAC,
                digest=b"" if secret is not None else digest,  # it would tell an unproven peer which model runs here
            )
        )
        self._peer: Hello | None = None
        self._peer_hello = b""
        self._frames = FrameDecoder(limits.max_hello_bytes)
        self._events: list[LinkEvent] = []
        self._out = bytearray()
        self._started = now
        self._heard = now
        self._spoke = now
        self._peer_max_frame = limits.max_frame_bytes
        self._heartbeat_s = limits.heartbeat_s
        self._received = self._sent = self._unknown = self._pings = 0
        if side is Side.DIALLER:
            self._write(self._hello)

    @property
    def state(self) -> LinkState:
        """Where the handshake stands."""
        return self._machine.state

    def statistics(self) -> LinkStatistics:
        """Counts so far."""
        return LinkStatistics(received=self._received, sent=self._sent, unknown=self._unknown)

    def receive(self, data: bytes | bytearray | memoryview, now: float) -> list[LinkEvent]:
        """Take bytes from the peer; empty bytes mean that it closed the connection."""
        if self.state is LinkState.CLOSED:
            return self._take_events()
        if not data:
            self._close(ErrorCode.LINK_LOST, "the peer closed the connection")
        else:
            self._heard = now
            self._frames.feed(data)
            try:
                self._take_messages(now)
            except RemoteError as error:
                self._say_bye(error.code, error.reason)
        return self._take_events()

    def send(self, message: Message, now: float) -> None:
        """Queue a message; dropped when the link is not open. Raises LocalError when it exceeds what the peer takes."""
        if self.state is not LinkState.OPEN:
            return
        self._send(message, now)

    def data_to_send(self) -> bytes:
        """Bytes for the connection, each handed out once."""
        data = bytes(self._out)
        self._out.clear()
        return data

    @property
    def has_data(self) -> bool:
        """Whether `data_to_send` would hand out anything."""
        return bool(self._out)

    def close(self, code: int = 0, reason: str = "") -> list[LinkEvent]:
        """End the link and tell the peer why. Idempotent."""
        self._say_bye(code, reason)
        return self._take_events()

    def lost(self, reason: str) -> list[LinkEvent]:
        """The connection broke. Idempotent."""
        self._close(ErrorCode.LINK_LOST, reason)
        return self._take_events()

    def next_deadline(self) -> float | None:
        """When `tick` wants to be called, in monotonic seconds."""
        if self.state is LinkState.CLOSED:
            return None
        if self.state is not LinkState.OPEN:
            return self._started + self._limits.handshake_s
        return min(self._heard + self._limits.liveness_s, self._spoke + self._heartbeat_s)

    def tick(self, now: float) -> list[LinkEvent]:
        """Let time pass: send a heartbeat, give up on a silent peer."""
        if self.state is LinkState.OPEN:
            silent = now - self._heard
            if silent >= self._limits.liveness_s:
                self._say_bye(ErrorCode.LIVENESS, f"no message from the peer for {silent:.1f} s")
            elif now - self._spoke >= self._heartbeat_s:
                self._pings += 1
                self._send(Ping(number=self._pings), now)
        elif self.state is not LinkState.CLOSED and now - self._started >= self._limits.handshake_s:
            self._say_bye(ErrorCode.LIVENESS, f"the handshake took more than {self._limits.handshake_s:.1f} s")
        return self._take_events()

    # ---- inside

    def _take_messages(self, now: float) -> None:
        while self.state is not LinkState.CLOSED:
            message = self._frames.next()
            if message is None:
                return
            self._received += 1
            if isinstance(message, UnknownMessage):
                self._take_unknown(message)
            elif self.state is LinkState.OPEN:
                self._take_open(message, now)
            else:
                self._take_handshake(message, now)

    def _take_unknown(self, message: UnknownMessage) -> None:
        if self.state is not LinkState.OPEN:
            raise RemoteError(
                ErrorCode.UNEXPECTED, f"message type {message.tag} came before the handshake was complete"
            )
        self._unknown += 1

    def _take_open(self, message: Message, now: float) -> None:
        if isinstance(message, Ping):
            self._send(Pong(number=message.number), now)
        elif isinstance(message, Pong):
            pass
        elif isinstance(message, Bye):
            self._take_bye(message)
        elif isinstance(message, Hello | Proof | Welcome):
            raise RemoteError(ErrorCode.UNEXPECTED, f"{type(message).__name__} came after the handshake")
        else:
            self._events.append(MessageReceived(message=message))

    def _take_handshake(self, message: Message, now: float) -> None:
        state = self.state
        if isinstance(message, Bye):
            self._take_bye(message)
        elif state is LinkState.HELLO and isinstance(message, Hello):
            self._take_hello(message)
        elif state is LinkState.PROOF and isinstance(message, Proof):
            self._take_proof(message)
        elif state is LinkState.WELCOME and isinstance(message, Welcome):
            self._take_welcome(message, now)
        else:
            raise RemoteError(ErrorCode.UNEXPECTED, f"{type(message).__name__} came where a {state.name} was due")

    def _take_bye(self, message: Bye) -> None:
        self._close(message.code or ErrorCode.LINK_LOST, message.reason or "the peer said goodbye")

    def _take_hello(self, hello: Hello) -> None:
        if hello.magic != MAGIC:
            raise RemoteError(ErrorCode.MALFORMED, "the peer does not speak the pdhandoff protocol")
        if hello.major != PROTOCOL_MAJOR:
            raise version_mismatch(hello.major, hello.minor)
        wanted = AUTH_NONE if self._secret is None else AUTH_HMAC
        if hello.authentication != wanted:
            raise RemoteError(
                ErrorCode.AUTHENTICATION,
                f"the peer wants authentication {hello.authentication!r}, this side {wanted!r}: "
                "set the same secret on both",
            )
        self._peer = hello
        self._peer_hello = self._frames.last_body
        if self.side is Side.LISTENER:
            self._write(self._hello)
        if self._secret is None:
            self._machine.feed(LinkInput.HELLO_PLAIN)
            self._say_welcome()
        else:
            self._machine.feed(LinkInput.HELLO_SECRET)
            if self.side is Side.DIALLER:  # the listener proves itself only to a peer that has done so
                self._write(encode_message(Proof(mac=self._mac(self._secret, self.side))))

    def _take_proof(self, proof: Proof) -> None:
        secret = self._secret
        other = Side.LISTENER if self.side is Side.DIALLER else Side.DIALLER
        if secret is None or not hmac.compare_digest(proof.mac, self._mac(secret, other)):
            raise RemoteError(ErrorCode.AUTHENTICATION, "the peer's proof is wrong: set the same secret on both sides")
        self._machine.feed(LinkInput.PROOF_RIGHT)
        if self.side is Side.LISTENER:
            self._write(encode_message(Proof(mac=self._mac(secret, self.side))))
        self._say_welcome()

    def _say_welcome(self) -> None:
        self._frames.max_frame_bytes = self._limits.max_frame_bytes
        self._write(encode_message(self._welcome))

    def _take_welcome(self, welcome: Welcome, now: float) -> None:
        peer = self._peer
        if peer is None:
            raise LocalError(ErrorCode.INTERNAL, "a WELCOME was taken before any HELLO")
        if welcome.max_frame_bytes < self._limits.max_hello_bytes:
            raise RemoteError(
                ErrorCode.UNEXPECTED,
                f"the peer takes messages of at most {welcome.max_frame_bytes} bytes: "
                f"{self._limits.max_hello_bytes} are needed for those that keep a link alive",
            )
        self._machine.feed(LinkInput.WELCOME)
        self._spoke = now
        # often enough for the peer's patience, and never so often that an odd value keeps this side busy
        self._heartbeat_s = min(self._limits.heartbeat_s, max(welcome.liveness_ms / 3000, MIN_HEARTBEAT_S))
        self._peer_max_frame = min(welcome.max_frame_bytes, self._limits.max_frame_bytes)
        self._events.append(LinkOpened(incarnation=Incarnation(peer.incarnation), welcome=welcome, digest=peer.digest))

    def _mac(self, secret: bytes, prover: Side) -> bytes:
        """Binds the proof to the prover's side and to every byte of both HELLOs, nonces included."""
        ours, theirs = self._hello[LENGTH_BYTES:], self._peer_hello
        dialled, listened = (ours, theirs) if self.side is Side.DIALLER else (theirs, ours)
        text = b"pdhandoff proof " + prover.value.encode() + b"\0" + dialled + listened
        return hmac.new(secret, text, hashlib.sha256).digest()

    def _send(self, message: Message, now: float) -> None:
        frame = encode_message(message)
        if len(frame) - LENGTH_BYTES > self._peer_max_frame:
            raise LocalError(
                ErrorCode.OVERSIZED, f"a {type(message).__name__} of {len(frame)} bytes exceeds what the peer takes"
            )
        self._spoke = now
        self._write(frame)

    def _write(self, frame: bytes) -> None:
        self._sent += 1
        self._out += frame

    def _say_bye(self, code: int, reason: str) -> None:
        if self.state is not LinkState.CLOSED:
            self._write(encode_message(Bye(code=code, reason=reason[: self._limits.max_string])))
            self._close(code, reason)

    def _close(self, code: int, reason: str) -> None:
        if self._machine.feed(LinkInput.CLOSE) is not None:
            self._events.append(LinkClosed(code=code, reason=reason))

    def _take_events(self) -> list[LinkEvent]:
        events, self._events = self._events, []
        return events

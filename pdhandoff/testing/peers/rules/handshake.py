"""P-01 to P-15: versions, who is let in and what it learns, framing, liveness. No handoff is needed."""

from __future__ import annotations

import os
import time
from typing import Any, Final

import msgspec

from pdhandoff.errors import ErrorCode
from pdhandoff.ids import Incarnation
from pdhandoff.limits import DEFAULT_LIMITS
from pdhandoff.protocol.codec import LENGTH_BYTES, encode_message
from pdhandoff.protocol.link import Side
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
from pdhandoff.testing.peers.line import Line, frame_of, prove
from pdhandoff.testing.peers.visit import Visit, name_of
from pdhandoff.testing.rule import Rule, require

__all__ = ["RULES"]

_NO_TYPE: Final = 60_000
"no version of the protocol has this message"


def _hello(v: Visit, **changes: Any) -> Hello:
    hello = Hello(
        magic=MAGIC,
        major=PROTOCOL_MAJOR,
        minor=PROTOCOL_MINOR,
        incarnation=bytes(Incarnation.mint()),
        nonce=os.urandom(16),
        authentication=AUTH_NONE if v.target.secret is None else AUTH_HMAC,
    )
    return msgspec.structs.replace(hello, **changes)


def _with_more(message: Message, **fields: object) -> bytes:
    """The body of a message of a newer version."""
    body = msgspec.msgpack.decode(encode_message(message)[LENGTH_BYTES:])
    return msgspec.msgpack.encode({**body, **fields})


def _shake(v: Visit, line: Line, hello: bytes, send: Any) -> None:
    """A whole handshake by hand. `send` takes frames."""
    send(frame_of(hello))
    v.expect(line, Hello, "an answer to a HELLO")
    if v.target.secret is not None:
        send(encode_message(prove(v.target.secret, Side.DIALLER, hello, line.hello_body)))
        proof = v.expect(line, Proof, "an answer to a right PROOF")
        right = prove(v.target.secret, Side.LISTENER, hello, line.hello_body)
        require(proof.mac == right.mac, "the consumer's PROOF is wrong")
    send(frame_of(_with_more(v.welcome(), future=[1, 2, 3])))
    v.expect(line, Welcome, "a WELCOME")
    v.alive(line, "a handshake")


def _refused(v: Visit, line: Line, what: str, *codes: ErrorCode) -> None:
    """The connection must end with one of these codes."""
    bye = v.ending(line, what)
    wanted = " or ".join(code.name for code in codes)
    require(bye.code in codes, f"after {what} the link ended with {name_of(bye.code)}, not with {wanted}")


def _says_who_it_is(v: Visit) -> None:
    hellos = []
    for _ in range(2):
        line = v.dial(by_hand=True)
        line.say(_hello(v))
        hellos.append(v.expect(line, Hello, "an answer to a HELLO"))
    first, second = hellos
    require(first.magic == MAGIC, f"its HELLO has the magic {first.magic!r}")
    require(first.major == PROTOCOL_MAJOR, f"its HELLO says version {first.major}.{first.minor}")
    require(first.incarnation == second.incarnation, "two links to one process see two incarnations")
    require(first.nonce != second.nonce, "two links got the same nonce: a proof could be used again")


def _refuses_other_majors(v: Visit) -> None:
    line = v.dial(by_hand=True)
    other = PROTOCOL_MAJOR + 41
    line.say_bytes(frame_of(msgspec.msgpack.encode({"t": 1, "magic": MAGIC, "major": other, "minor": 7, "nonce": "?"})))
    bye = v.ending(line, "a HELLO of another major version")
    require(bye.code == ErrorCode.VERSION, f"another major version is refused with {name_of(bye.code)}, not VERSION")
    named = f"{other}.7" in bye.reason and f"{PROTOCOL_MAJOR}." in bye.reason
    require(named, f"the reason does not name both versions: {bye.reason}")


def _takes_newer_minors(v: Visit) -> None:
    line = v.dial(by_hand=True)
    hello = _with_more(_hello(v, minor=PROTOCOL_MINOR + 9), future={"a": 1})
    _shake(v, line, hello, line.say_bytes)


def _tells_nothing_before_a_hello(v: Visit) -> None:
    line = v.dial(by_hand=True)
    v.quiet()
    require(not line.heard, "it speaks before it was spoken to")
    line.say(_hello(v))
    v.expect(line, Hello, "an answer to a HELLO")
    if v.target.secret is not None:
        v.quiet()
        told = [type(message).__name__ for message in line.heard[1:]]
        require(not told, f"before any PROOF it sends {', '.join(told)}")
        hello = line.heard[0]
        require(isinstance(hello, Hello) and not hello.digest, "its HELLO discloses a layout's digest")


def _wants_the_right_proof(v: Visit) -> None:
    line = v.dial(by_hand=True)
    if v.target.secret is None:
        line.say(_hello(v, authentication=AUTH_HMAC))
        _refused(v, line, "a HELLO that wants a secret, where none is used", ErrorCode.AUTHENTICATION)
        return
    line.say(_hello(v, authentication=AUTH_NONE))
    _refused(v, line, "a HELLO without a secret", ErrorCode.AUTHENTICATION)
    line = v.dial(by_hand=True)
    hello = encode_message(_hello(v))[LENGTH_BYTES:]
    line.say_bytes(frame_of(hello))
    v.expect(line, Hello, "an answer to a HELLO")
    line.say(prove(v.target.secret, Side.LISTENER, hello, line.hello_body))  # of the wrong side
    _refused(v, line, "a wrong PROOF", ErrorCode.AUTHENTICATION)
    told = [type(message).__name__ for message in line.heard if not isinstance(message, Hello | Bye)]
    require(not told, f"to a peer with a wrong PROOF it sends {', '.join(told)}")


_NO_MESSAGES: Final = {
    "bytes that are no map": b"\xff\xff\xff\xff",
    "an empty frame": b"",
    "a map without a type": msgspec.msgpack.encode({"magic": MAGIC}),
    "a HELLO without its fields": msgspec.msgpack.encode({"t": 1}),
    "fields of the wrong kind": msgspec.msgpack.encode({"t": 30, "number": "seven"}),
}


def _survives_what_is_no_message(v: Visit) -> None:
    bystander = v.open()
    for what, body in _NO_MESSAGES.items():
        line = v.dial(by_hand=True)
        line.say_bytes(frame_of(body))
        _refused(v, line, f"{what}, before a handshake", ErrorCode.MALFORMED, ErrorCode.UNEXPECTED)
        line = v.open()
        line.say_bytes(frame_of(body))
        _refused(v, line, f"{what}, on an open link", ErrorCode.MALFORMED, ErrorCode.UNEXPECTED)
    v.alive(bystander, "nonsense on other links")
    v.open()


def _bounds_frames(v: Visit) -> None:
    bystander = v.open()
    line = v.dial(by_hand=True)
    line.say_bytes((DEFAULT_LIMITS.max_hello_bytes + 1).to_bytes(LENGTH_BYTES, "big"))
    _refused(v, line, "the length of a first frame over 4096 bytes", ErrorCode.OVERSIZED)
    line = v.open()
    line.say_bytes((v.target.welcome.max_frame_bytes + 1).to_bytes(LENGTH_BYTES, "big"))
    _refused(v, line, "a length over the max_frame_bytes of its WELCOME", ErrorCode.OVERSIZED)
    v.alive(bystander, "a length over the bound on another link")


def _drops_unknown_types(v: Visit) -> None:
    line = v.open()
    line.say_bytes(frame_of(msgspec.msgpack.encode({"t": _NO_TYPE, "anything": [1]})))
    v.alive(line, "a message of a type that a newer version may have")


def _keeps_the_order_of_the_handshake(v: Visit) -> None:
    line = v.dial(by_hand=True)
    line.say(v.welcome())
    _refused(v, line, "a WELCOME before any HELLO", ErrorCode.UNEXPECTED, ErrorCode.OVERSIZED)
    for message in (_hello(v), v.welcome()):
        line = v.open()
        line.say(message)
        _refused(v, line, f"a {type(message).__name__} on an open link", ErrorCode.UNEXPECTED)


def _takes_bytes_however_they_are_cut(v: Visit) -> None:
    line = v.dial(by_hand=True)

    def one_by_one(frame: bytes) -> None:
        for index in range(len(frame)):
            line.say_bytes(frame[index : index + 1])

    def cut(frame: bytes) -> None:
        one_by_one(frame[:64])
        line.say_bytes(frame[64:])

    _shake(v, line, encode_message(_hello(v))[LENGTH_BYTES:], cut)
    one_by_one(encode_message(Ping(number=7)))
    v.expect(line, Pong, "the answer to a PING byte by byte", lambda pong: pong.number == 7)
    line.say(*(Ping(number=number) for number in range(100, 200)))
    for number in range(100, 200):
        pong = v.expect(line, Pong, f"the answer to PING {number} of many in one piece")
        require(pong.number == number, f"PING {number} is answered by PONG {pong.number}")


def _refuses_other_movers(v: Visit) -> None:
    line = v.dial(mover="no-such-mover")
    _refused(v, line, "a WELCOME with another mover", ErrorCode.MOVER_MISMATCH)


def _refuses_what_it_cannot_use(v: Visit) -> None:
    from pdhandoff.layouts import decode_layout, encode_layout

    layout = decode_layout(v.target.produces, DEFAULT_LIMITS)
    model = msgspec.structs.replace(layout.model, name=f"not {layout.model.name}")
    other = encode_layout(msgspec.structs.replace(layout, model=model))
    _refused(v, v.dial(produces=other), "a producer of another model's state", ErrorCode.LAYOUT_MISMATCH)
    v.ending(v.dial(produces=b"\xc1 no layout"), "a layout that is none")
    v.ending(v.dial(produces=b""), "a peer that produces nothing")


def _speaks_in_time(v: Visit) -> None:
    """The kit says how patient it is, and then nothing."""
    patience_ms = max(300, int(v.target.welcome.liveness_ms * 0.8))
    line = v.open(liveness_ms=patience_ms)
    v.alive(line, "a handshake")
    heard = len(line.heard)
    line.muted = True
    v.until(
        lambda: len(line.heard) > heard or line.ended,
        f"any message, over an idle link whose WELCOME asks for one every {patience_ms} ms",
        within_s=patience_ms / 1000,
    )
    require(len(line.heard) > heard, "an idle link ended before its time")


def _gives_up_the_silent(v: Visit) -> None:
    liveness_s = v.target.welcome.liveness_ms / 1000
    bystander, line = v.open(), v.open()
    v.alive(line, "a handshake")
    line.muted = True
    started = time.monotonic()
    bye = v.ending(line, "silence", liveness_s + v.patience.slack_s)
    require(bye.code == ErrorCode.LIVENESS, f"a silent link ended with {name_of(bye.code)}, not with LIVENESS")
    silent_s = time.monotonic() - started
    require(silent_s > liveness_s / 2, f"a link was given up after {silent_s:.1f} s; it had {liveness_s:g}")
    v.alive(bystander, "the end of a silent link")


def _bounds_handshakes(v: Visit) -> None:
    line = v.dial(by_hand=True)
    v.until(lambda: line.ended, "the end of a connection that never says anything", within_s=v.patience.handshake_s)


RULES = (
    Rule(
        number="P-01",
        title="a HELLO that says who",
        must="HELLO MUST be answered by a HELLO with magic and version, the same incarnation on every link of one "
        "life, and a nonce that is fresh for every link.",
        check=_says_who_it_is,
    ),
    Rule(
        number="P-02",
        title="other major versions",
        must="A HELLO of another major version MUST be refused with VERSION, naming both, whatever else is in it.",
        check=_refuses_other_majors,
    ),
    Rule(
        number="P-03",
        title="newer minor versions",
        must="A newer minor version and unknown fields MUST be taken.",
        check=_takes_newer_minors,
    ),
    Rule(
        number="P-04",
        title="nothing before a proof",
        must="Nothing MUST be said before a HELLO and, with a secret, nothing but a HELLO before a right PROOF.",
        check=_tells_nothing_before_a_hello,
    ),
    Rule(
        number="P-05",
        title="the right proof",
        must="A peer without the right proof, or that wants one where there is no secret, MUST be refused with "
        "AUTHENTICATION and learn nothing.",
        check=_wants_the_right_proof,
    ),
    Rule(
        number="P-06",
        title="what is no message",
        must="Bytes that are no message MUST end their link with a BYE that says so, and no other link.",
        check=_survives_what_is_no_message,
    ),
    Rule(
        number="P-07",
        title="bounded frames",
        must="A length over its bound MUST end the link with OVERSIZED before the bytes come: 4096 until the peer has "
        "proven itself, then max_frame_bytes.",
        check=_bounds_frames,
    ),
    Rule(
        number="P-08",
        title="unknown messages",
        must="Messages of unknown types MUST be dropped on an open link.",
        check=_drops_unknown_types,
    ),
    Rule(
        number="P-09",
        title="the order of the handshake",
        must="A message of the handshake that comes where it is not due MUST end the link.",
        check=_keeps_the_order_of_the_handshake,
    ),
    Rule(
        number="P-10",
        title="bytes however cut",
        must="What is understood MUST NOT depend on how the bytes were cut; every PING MUST be answered, in order.",
        check=_takes_bytes_however_they_are_cut,
    ),
    Rule(
        number="P-11",
        title="other movers",
        must="A producer with another mover MUST be refused with MOVER_MISMATCH.",
        check=_refuses_other_movers,
    ),
    Rule(
        number="P-12",
        title="state of no use",
        must="A producer whose state cannot be used MUST be refused when it connects: LAYOUT_MISMATCH for another "
        "model.",
        check=_refuses_what_it_cannot_use,
    ),
    Rule(
        number="P-13",
        title="idle links live",
        must="An idle link MUST be kept alive by messages within the liveness_ms of the peer's WELCOME.",
        check=_speaks_in_time,
    ),
    Rule(
        number="P-14",
        title="silent links end",
        must="A link without any message for liveness_ms MUST end with LIVENESS, not much sooner or later.",
        check=_gives_up_the_silent,
    ),
    Rule(
        number="P-15",
        title="bounded handshakes",
        must="A connection that does not shake hands MUST be closed in bounded time.",
        check=_bounds_handshakes,
    ),
)

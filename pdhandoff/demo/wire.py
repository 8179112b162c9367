"""What the demo's parent and its two node processes say to each other: one JSON object per line, over pipes.

This is no part of the handoff protocol. It stands in for the router and the front ends of a deployment.
"""

from __future__ import annotations

from typing import Final, final

import msgspec

__all__ = [
    "Announce",
    "ColdRun",
    "Command",
    "Compare",
    "Compared",
    "Decoded",
    "Event",
    "NodeReady",
    "Prefill",
    "Request",
    "Sent",
    "Stop",
    "Stopped",
    "decode_command",
    "decode_event",
    "encode",
]


@final
class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request of the demo."""

    number: int
    handoff: str
    prompt: list[int]


# ---- commands


@final
class Announce(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To decode: wait for these, decode each as it arrives."""

    requests: list[Request]
    max_tokens: int


@final
class Prefill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To prefill: prefill these together, chunk by chunk, and hand each off while it runs."""

    requests: list[Request]
    consumer: str
    chunk: int


@final
class Compare(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To decode: decode the same prompt after a prefill in that process, and say what comes out."""

    request: Request
    max_tokens: int
    cold: bool
    "decode it once more without the draft layer's rows"


@final
class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To both: write the recording and end."""

    recording: str
    "file to write it to"


Command = Announce | Prefill | Compare | Stop

# ---- events


@final
class NodeReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The node takes commands."""

    address: str = ""
    "control address, of a decode node"
    native: str = ""
    "what converts rows there"


@final
class Sent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From prefill: how a handoff ended there."""

    number: int
    handoff: str
    chunks: int
    nbytes: int
    "rows that moved"
    code: int
    "0: READY"
    reason: str
    prefill_end_ns: int


@final
class Decoded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From decode: how a handoff ended there."""

    number: int
    handoff: str
    code: int
    "0: decoded"
    reason: str
    tokens: list[int] = []
    drafts_accepted_first_step: int = 0
    steps: int = 0
    cold_start: bool = False
    nbytes: int = 0


@final
class ColdRun(msgspec.Struct, frozen=True, kw_only=True):
    """How a prompt was decoded without the draft layer's rows."""

    tokens: list[int]
    drafts_accepted_first_step: int
    steps: int


@final
class Compared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From decode: what the same engine decodes after a local prefill."""

    number: int
    tokens: list[int]
    cold: ColdRun | None
    "the same without the draft layer's rows of the prompt, where that was asked for"


@final
class Stopped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Last word of a node: what it still holds. Everything should be free."""

    landing_bytes_held: int = 0
    handoffs: int = 0
    writes_in_flight: int = 0
    pages_held: int = 0


Event = NodeReady | Sent | Decoded | Compared | Stopped

_COMMANDS: Final = msgspec.json.Decoder(Command)
_EVENTS: Final = msgspec.json.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


def decode_command(line: bytes) -> Command:
    """A parent's command. Raises msgspec.MsgspecError."""
    return _COMMANDS.decode(line)


def decode_event(line: bytes) -> Event:
    """A node's event. Raises msgspec.MsgspecError."""
    return _EVENTS.decode(line)

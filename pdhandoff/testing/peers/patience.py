"""How much a run against a consumer asks for, and how long it waits."""

from __future__ import annotations

from typing import final

import msgspec

__all__ = ["Patience"]


@final
class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes, and times in seconds."""

    tokens: int = 100
    "of the prompts that are handed off"
    many: int = 64
    "offers at the same time"
    queued: int = 8
    "offers that wait for memory at the same time"
    answer_s: float = 10.0
    "within which an answer has come"
    quiet_s: float = 0.5
    "how long is listened for what must not come"
    slack_s: float = 5.0
    "by which a time-out of the consumer may come late"
    handshake_s: float = 15.0
    "within which a connection that says nothing is closed"
    free_s: float = 150.0
    "within which all memory is free again, when nobody claims what has arrived and when a producer has died"
    full_grants: int = 256
    "grants that fill the consumer's memory, at most; a larger memory is not filled"

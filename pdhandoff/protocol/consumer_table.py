"""The consumer's machine of one handoff, as a table."""

from __future__ import annotations

from typing import Final, final

from pdhandoff.protocol.table import Name, Table

__all__ = ["TABLE", "ConsumerInput", "ConsumerState"]


@final
class ConsumerState(Name):
    """Where a handoff stands on the side that decodes."""

    NEW = "new"
    ANNOUNCED = "announced"  # the front end waits for it, no shard has offered
    UNANNOUNCED = "unannounced"  # a shard has offered, nobody waits for it yet
    ASSEMBLING = "assembling"  # some shards have offered
    QUEUED = "queued"  # all have; no memory yet
    LANDING = "landing"  # granted
    VERIFYING = "verifying"  # every shard has committed
    READY = "ready"  # checked; waits for its reader
    READING = "reading"  # the reader holds it
    DONE = "done"
    FAILED = "failed"


@final
class ConsumerInput(Name):
    """What can happen to it."""

    ANNOUNCE = "announce"
    OFFER = "offer"
    ALL_OFFERED = "all shards offered"
    RESERVED = "memory reserved"
    ALL_COMMITTED = "all shards committed"
    VERIFIED = "verified"
    CLAIM = "claim"
    RELEASE = "release"
    FAIL = "error, time-out, cancel or lost link"


_S, _I = ConsumerState, ConsumerInput

TABLE: Final = Table(
    "consumer",
    initial=_S.NEW,
    terminal=(_S.DONE, _S.FAILED),
    rows=(
        (_S.NEW, _I.ANNOUNCE, _S.ANNOUNCED, "expect"),
        (_S.NEW, _I.OFFER, _S.UNANNOUNCED, "wait for announcement"),
        (_S.NEW, _I.FAIL, _S.FAILED, "end"),
        (_S.ANNOUNCED, _I.OFFER, _S.ASSEMBLING, "assemble"),
        (_S.ANNOUNCED, _I.FAIL, _S.FAILED, "end"),
        (_S.UNANNOUNCED, _I.ANNOUNCE, _S.ASSEMBLING, "assemble"),
        (_S.UNANNOUNCED, _I.FAIL, _S.FAILED, "end"),
        (_S.ASSEMBLING, _I.ALL_OFFERED, _S.QUEUED, "queue"),
        (_S.ASSEMBLING, _I.FAIL, _S.FAILED, "end"),
        (_S.QUEUED, _I.RESERVED, _S.LANDING, "grant"),
        (_S.QUEUED, _I.FAIL, _S.FAILED, "end"),
        (_S.LANDING, _I.ALL_COMMITTED, _S.VERIFYING, "verify"),
        (_S.LANDING, _I.FAIL, _S.FAILED, "end"),
        (_S.VERIFYING, _I.VERIFIED, _S.READY, "announce arrival"),
        (_S.VERIFYING, _I.FAIL, _S.FAILED, "end"),
        (_S.READY, _I.CLAIM, _S.READING, "lend"),
        (_S.READY, _I.FAIL, _S.FAILED, "end"),
        (_S.READING, _I.RELEASE, _S.DONE, "free"),
    ),
)

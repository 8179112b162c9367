"""The producer's machine of one shard of one handoff, as a table."""

from __future__ import annotations

from typing import Final, final

from pdhandoff.protocol.table import Name, Table

__all__ = ["TABLE", "ProducerInput", "ProducerState"]


@final
class ProducerState(Name):
    """Where a shard stands on the side that prefilled."""

    OFFERED = "offered"
    QUEUED = "queued"  # the consumer said so, and which place it has
    MOVING = "moving"  # granted: rows may be written
    RESTARTING = "restarting"  # the source rows were lost; waits until nothing is in flight
    COMMITTING = "committing"  # all rows were handed to the mover; waits until nothing is in flight
    COMMITTED = "committed"  # waits for READY
    ENDING = "ending"  # the outcome is known; waits until nothing is in flight
    READY = "ready"
    FAILED = "failed"


@final
class ProducerInput(Name):
    """What can happen to it."""

    QUEUED = "queued"
    GRANT = "grant"
    RESTART = "restart"
    COMMIT = "commit"
    QUIET = "nothing in flight"
    READY = "ready"
    END = "refusal, error, time-out, cancel or lost link"


_S, _I = ProducerState, ProducerInput

TABLE: Final = Table(
    "producer",
    initial=_S.OFFERED,
    terminal=(_S.READY, _S.FAILED),
    rows=(
        (_S.OFFERED, _I.QUEUED, _S.QUEUED, "note position"),
        (_S.OFFERED, _I.GRANT, _S.MOVING, "write"),
        (_S.OFFERED, _I.END, _S.FAILED, "settle"),
        (_S.QUEUED, _I.QUEUED, _S.QUEUED, "note position"),
        (_S.QUEUED, _I.GRANT, _S.MOVING, "write"),
        (_S.QUEUED, _I.END, _S.FAILED, "settle"),
        (_S.MOVING, _I.RESTART, _S.RESTARTING, "stop writing"),
        (_S.MOVING, _I.COMMIT, _S.COMMITTING, "stop writing"),
        (_S.MOVING, _I.END, _S.ENDING, "settle"),
        (_S.RESTARTING, _I.QUIET, _S.MOVING, "say RESTART"),
        (_S.RESTARTING, _I.END, _S.ENDING, "settle"),
        (_S.COMMITTING, _I.QUIET, _S.COMMITTED, "say COMMIT"),
        (_S.COMMITTING, _I.END, _S.ENDING, "settle"),
        (_S.COMMITTED, _I.READY, _S.READY, "settle"),
        (_S.COMMITTED, _I.END, _S.FAILED, "settle"),
        (_S.ENDING, _I.QUIET, _S.FAILED, "say DRAINED"),
    ),
)

"""The names of what a handoff goes through, so that recordings of different processes can be read together."""

from __future__ import annotations

import enum
from typing import final

__all__ = ["HANDOFF", "Step"]

HANDOFF = "handoff"
"the argument of a span or instant that says which handoff it belongs to; the value is a label for people"


@final
class Step(enum.StrEnum):
    """What a span or an instant stands for. The timeline draws these; any other name goes into the trace only."""

    OFFER = "offer"
    "instant: the producer has offered"
    GRANT = "grant"
    "instant: the consumer's grant has reached the producer"
    COMMIT = "commit"
    "instant: the producer has committed"
    PREFILL = "prefill"
    "span: one chunk of the prompt in the prefill engine"
    GATHER = "gather"
    "span: its pages are copied into the staging ring"
    WRITE = "write"
    "span: from submitting the chunk's writes until the mover reports them done"
    LANDED = "landed"
    "instant: the consumer has been told that the chunk has landed"
    READY = "ready"
    "instant: every shard committed and checked; the source may go"
    WAIT = "wait"
    "span: everything is there, but the decode engine is busy with another request"
    CONVERT = "convert"
    "span: landed rows become the decode engine's caches"
    DECODE = "decode"
    "span: one decode step"

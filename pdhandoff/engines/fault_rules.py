"""Scripts of faults, as data: what happens to which batch. `faults` plays them.

The first rule that matches a batch and has uses left decides. Nothing is random, but for `random_script`, which draws a
script from a generator that the caller seeds.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping, Sequence
from typing import final

import msgspec

__all__ = ["Fault", "FaultStatistics", "Rule", "random_script"]


@final
class Fault(enum.Enum):
    """What happens to a batch, or to a registration."""

    DELAY = "delay"
    "starts after so many polls"
    HOLD = "hold"
    "starts when `release_hold` is called"
    DROP = "drop"
    "fails after so many polls; nothing lands"
    FAIL = "fail"
    "fails at once; nothing lands"
    PARTIAL = "partial"
    "the first half of its bytes lands, then it fails"
    DUPLICATE = "duplicate"
    "is written twice"
    LATE = "late"
    "fails without being quiet, lands when `land_late` is called, and is quiet then"
    FLIP = "flip"
    "one bit of one byte is turned over in flight; reported as done"
    REFUSE = "refuse"
    "`submit` raises"
    REGISTER = "register"
    "`register` raises"


@final
class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, and which calls it strikes. A field left at None matches every call."""

    fault: Fault
    call: int | None = None
    "number of the `submit` (of the `register`, for REGISTER), counted from 0"
    peer: str | None = None
    "key of the peer"
    min_bytes: int = 0
    max_bytes: int | None = None
    times: int | None = 1
    "how often it strikes; None: always"
    polls: int = 1
    "for DELAY and DROP: how many polls answer PENDING first"
    byte: int = 0
    "for FLIP: which byte of the batch, counted over its writes in order"

    def matches(self, *, call: int, peer: str | None, nbytes: int) -> bool:
        """Whether it strikes this call, uses left or not."""
        return (
            self.call in {None, call}
            and self.peer in {None, peer}
            and self.min_bytes <= nbytes
            and (self.max_bytes is None or nbytes <= self.max_bytes)
        )


@final
class FaultStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the wrapper was made."""

    submits: int
    registers: int
    fired: Mapping[Fault, int]
    held: int
    "batches that wait for `release_hold`"
    late: int
    "batches that wait for `land_late`"


def random_script(
    generator: random.Random, *, submits: int, rate: float, faults: Sequence[Fault] = tuple(Fault)
) -> tuple[Rule, ...]:
    """A script in which each of the first `submits` batches meets a fault with probability `rate`.

    Arguments:
        generator: seeded by the caller; the same seed gives the same script.
        submits: how many batches to draw for.
        rate: between 0 and 1.
        faults: what to draw from; REGISTER is left out.
    """
    choices = [fault for fault in faults if fault is not Fault.REGISTER]
    return tuple(
        Rule(fault=generator.choice(choices), call=call, polls=generator.randint(1, 4), byte=generator.getrandbits(20))
        for call in range(submits)
        if generator.random() < rate
    )

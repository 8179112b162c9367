"""Every error that pdhandoff raises or puts on the wire.

Blame is in the type: `LocalError` means this process asked for something wrong, `RemoteError` means a peer said or did
something wrong, `HandoffFailed` means that one handoff ended without success. Each carries a wire code
(`ErrorCode`), says whether trying again can help (`retryable`) and ends with what to do.
"""

from __future__ import annotations

import enum
from typing import Final, final

__all__ = [
    "ErrorCode",
    "HandoffFailed",
    "LayoutError",
    "LocalError",
    "MoverError",
    "PdHandoffError",
    "PlanError",
    "RemoteError",
    "is_retryable",
]


@final
class ErrorCode(enum.IntEnum):
    """Why something was refused or failed. The numbers travel on the wire and are never reused.

    An unknown number from a newer peer stays an integer: it is shown, treated as not retryable, and harms nothing.
    """

    # link
    VERSION = 1  # no protocol version in common
    AUTHENTICATION = 2  # a proof is missing or wrong
    MALFORMED = 3  # bytes that are no message of this protocol
    OVERSIZED = 4  # a length, count or string over its limit
    UNEXPECTED = 5  # a well-formed message that this state does not allow
    LINK_LOST = 6  # the connection ended
    LIVENESS = 7  # the peer was silent for too long
    STALE_INCARNATION = 8  # the peer restarted; what was known of it is gone
    NOT_ALLOWED = 9  # the peer is not on the allow-list
    # layouts and plans
    LAYOUT_MISMATCH = 20  # the two layouts cannot be bridged
    UNKNOWN_COMPONENT = 21  # a kind of state that this side does not know
    MOVER_MISMATCH = 22  # the two sides move bytes by different movers
    MANIFEST_MISMATCH = 23  # the two sides disagree on what moves
    ATTACHMENT = 24  # an attachment is required and unknown, or has the wrong shape
    OUT_OF_RANGE = 25  # an address or token outside what was granted or registered
    # admission
    NOT_ANNOUNCED = 40  # nobody on the consumer waits for this handoff
    DUPLICATE = 41  # this handoff id, shard or reference was already used
    TOO_LARGE = 42  # can never fit in the arena
    BUSY = 43  # no room now, and the queue is full or not wanted
    QUEUE_TIMEOUT = 44  # waited as long as the caller allowed
    DRAINING = 45  # this side takes no new handoffs
    EXPIRED = 46  # somebody did not come in time: a producer, a shard, a reader, an answer to COMMIT
    # transfer
    LEASE_EXPIRED = 60  # a shard gave no sign of life within its lease
    TRANSFER_TIMEOUT = 61  # the bytes took longer than their budget
    MOVER_FAILED = 62  # the mover reported a failed write
    SHARD_FAILED = 63  # another shard of the same handoff failed
    INCOMPLETE = 64  # committed before every row had landed
    DIGEST_MISMATCH = 65  # what landed is not what was sent
    CANCELLED = 66  # one side ended it on purpose
    UNKNOWN_HANDOFF = 67  # no such handoff, or no such generation of it
    RING_FULL = 68  # no staging memory for a chunk
    SOURCE_LOST = 69  # the source rows are gone
    # local
    CONFIG = 80  # a setting is wrong
    MISUSE = 81  # the library was called out of order
    INTERNAL = 82  # a fault of the library itself: report it


_RETRYABLE: Final = frozenset(
    {
        ErrorCode.LINK_LOST,
        ErrorCode.LIVENESS,
        ErrorCode.STALE_INCARNATION,
        ErrorCode.BUSY,
        ErrorCode.QUEUE_TIMEOUT,
        ErrorCode.DRAINING,
        ErrorCode.EXPIRED,
        ErrorCode.LEASE_EXPIRED,
        ErrorCode.TRANSFER_TIMEOUT,
        ErrorCode.MOVER_FAILED,
        ErrorCode.SHARD_FAILED,
        ErrorCode.DIGEST_MISMATCH,
        ErrorCode.RING_FULL,
        ErrorCode.SOURCE_LOST,
    }
)


_KNOWN: Final = frozenset(map(int, ErrorCode))


def is_retryable(code: int) -> bool:
    """Whether a new handoff (with a new id) for the same request may succeed. False for codes not known here."""
    return code in _RETRYABLE


class PdHandoffError(Exception):
    """Root of all errors of this library.

    Attributes:
        code: an `ErrorCode`, or the integer a newer peer sent.
        reason: one sentence that names the culprit and says what to do.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = ErrorCode(code) if code in _KNOWN else code
        self.reason = reason

    def __str__(self) -> str:
        name = self.code.name if isinstance(self.code, ErrorCode) else f"code {self.code}"
        return f"{name}: {self.reason}"

    @property
    def retryable(self) -> bool:
        """Whether trying again with a new handoff id can help."""
        return is_retryable(self.code)


class LocalError(PdHandoffError):
    """This process called the library wrongly, or configured it wrongly."""


class LayoutError(LocalError):
    """A layout descriptor is inconsistent, or two of them cannot be bridged. `field` names where."""

    def __init__(self, code: int, reason: str, *, field: str) -> None:
        super().__init__(code, reason)
        self.field = field


class PlanError(LocalError):
    """A plan would leave its bounds, or exceeds a limit."""


class RemoteError(PdHandoffError):
    """A peer sent what the protocol does not allow. It ends that peer's link and nothing else."""


class MoverError(PdHandoffError):
    """A mover refused or failed an operation."""


class HandoffFailed(PdHandoffError):
    """One handoff ended without success. `shard` is the rank that failed first, where one did."""

    def __init__(self, code: int, reason: str, *, shard: int | None = None) -> None:
        super().__init__(code, reason)
        self.shard = shard

"""What the protocol's machines ask their runtime to do. Data only; the runtime does it and reports back by inputs."""

from __future__ import annotations

from typing import NamedTuple

from pdhandoff.ids import HandoffId, Incarnation
from pdhandoff.protocol.book import Landing
from pdhandoff.protocol.messages import Grant, Message
from pdhandoff.protocol.spans import Span

__all__ = [
    "Arrived",
    "ConsumerEffect",
    "Ended",
    "FenceWriter",
    "Freed",
    "GrantShard",
    "Granted",
    "Landed",
    "ProducerEffect",
    "ProveEnded",
    "Restarted",
    "RowsVoid",
    "Send",
    "Settled",
    "SourceFree",
    "Verify",
]


class Send(NamedTuple):
    """Send a message over a link."""

    link: int
    message: Message


# ---- consumer


class GrantShard(NamedTuple):
    """Describe these extents with the mover and send GRANT."""

    link: int
    handoff: HandoffId
    generation: int
    shard: int
    start_token: int
    lease_ms: int
    extents: dict[int, tuple[Landing, ...]]
    "consumer rank -> its extents, in piece order"


class Landed(NamedTuple):
    """Rows have landed and may be converted early, under a reader."""

    handoff: HandoffId
    generation: int
    shard: int
    spans: tuple[Span, ...]


class RowsVoid(NamedTuple):
    """What had landed of this shard is void: convert it anew."""

    handoff: HandoffId
    generation: int
    shard: int


class Verify(NamedTuple):
    """Every shard is committed. Check the payload digests, then call `verified` or `verification_failed`.

    The memory is held until one of them is called, whatever becomes of the handoff meanwhile.
    """

    handoff: HandoffId
    generation: int
    digests: dict[int, bytes]
    "shard -> payload digest; only of the shards that sent one"


class Arrived(NamedTuple):
    """Complete and checked: may be claimed."""

    handoff: HandoffId
    generation: int


class Ended(NamedTuple):
    """The handoff ended without success. Its memory may still have writers."""

    handoff: HandoffId
    code: int
    reason: str
    shard: int | None


class ProveEnded(NamedTuple):
    """Ask the mover (quiesce) whether this peer has ended, then call `proven_ended` if so."""

    incarnation: Incarnation


class FenceWriter(NamedTuple):
    """Fence this writer off these extents, then call `fenced`."""

    generation: int
    shard: int
    incarnation: Incarnation
    extents: tuple[Landing, ...]


class Freed(NamedTuple):
    """The memory of this generation is free again."""

    generation: int


ConsumerEffect = Send | GrantShard | Landed | RowsVoid | Verify | Arrived | Ended | ProveEnded | FenceWriter | Freed


# ---- producer


class Granted(NamedTuple):
    """Start writing."""

    handoff: HandoffId
    grant: Grant


class Restarted(NamedTuple):
    """The peer has been told; write the rows anew."""

    handoff: HandoffId


class Settled(NamedTuple):
    """The handoff has its outcome: code 0 means READY."""

    handoff: HandoffId
    code: int
    reason: str


class SourceFree(NamedTuple):
    """No write of this handoff reads source memory any more, and none will."""

    handoff: HandoffId


ProducerEffect = Send | Granted | Restarted | Settled | SourceFree

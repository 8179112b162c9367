"""A GRANT: extents as the book has them, described by the mover."""

from __future__ import annotations

from pdhandoff.engines.base import Extent, Mover
from pdhandoff.protocol.effects import GrantShard
from pdhandoff.protocol.messages import Grant, GrantedRank

__all__ = ["describe_grant"]


def describe_grant(mover: Mover, effect: GrantShard) -> Grant:
    """The message. Raises MoverError when the mover cannot describe an extent."""
    ranks = tuple(
        GrantedRank(
            destination,
            tuple((extent.address, extent.length) for extent in extents),
            mover.describe([Extent(*extent) for extent in extents]),
        )
        for destination, extents in effect.extents.items()
    )
    return Grant(
        handoff=effect.handoff,
        generation=effect.generation,
        shard=effect.shard,
        lease_ms=effect.lease_ms,
        start_token=effect.start_token,
        ranks=ranks,
    )

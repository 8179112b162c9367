"""Every rule of consumers, in order. Numbers are never given to another rule."""

from __future__ import annotations

from typing import Final

from pdhandoff.testing.peers.rules import handshake, memory, moving, offers
from pdhandoff.testing.rule import Rule

__all__ = ["ALL_PEER_RULES"]

ALL_PEER_RULES: Final[tuple[Rule, ...]] = (
    *handshake.RULES,
    *offers.RULES,
    moving.FIRST_RULE,
    *offers.ANNOUNCED_RULES,
    *moving.RULES,
    *memory.RULES,
)

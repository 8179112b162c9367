"""What every mover promises, held against Mooncake: the rules of `test_contract` that its capabilities claim."""

from __future__ import annotations

from typing import Final

from support.contract import rules
from support.mooncake_fixtures import library, make

__all__ = ["library", "make"]

NOT_CLAIMED: Final = frozenset(
    {
        "test_a_fenced_extent_takes_no_write_of_an_earlier_grant",
        "test_a_living_peer_is_never_quiet_and_an_ended_one_always",
        "test_an_ended_peer_cannot_be_connected_to",
        "test_only_aligned_extents_of_registered_memory_can_be_granted_or_fenced",
    }
)

globals().update(rules(without=NOT_CLAIMED))

"""What every mover promises, held against NIXL: all rules of `test_contract` but the one on `quiesce`, not claimed."""

from __future__ import annotations

import pytest

from support.contract import rules
from support.nixl_fixtures import library, make

__all__ = ["library", "make"]

pytestmark = pytest.mark.slow

globals().update(rules(without=frozenset({"test_a_living_peer_is_never_quiet_and_an_ended_one_always"})))

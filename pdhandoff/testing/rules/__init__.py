"""All rules, in the order of their numbers."""

from __future__ import annotations

from typing import Final

from pdhandoff.testing.rule import Rule
from pdhandoff.testing.rules import bounds, death, landing, lifetime, outcome, proofs

__all__ = ["ALL_RULES"]

ALL_RULES: Final[tuple[Rule, ...]] = tuple(
    sorted(
        (*bounds.RULES, *landing.RULES, *outcome.RULES, *death.RULES, *proofs.RULES, *lifetime.RULES),
        key=lambda rule: rule.number,
    )
)

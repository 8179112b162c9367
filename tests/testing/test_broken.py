"""The rules are able to fail: each broken mover fails its own rule and no other."""

from __future__ import annotations

import pytest

from pdhandoff.testing import ALL_RULES, Sizes, Verdict, run_conformance
from testing.broken import BIG, BROKEN

pytestmark = pytest.mark.slow

SIZES = Sizes(
    large_bytes=2 * BIG,
    descriptors=5000,
    storm_bytes=BIG,
    settle_s=20.0,
    death_s=1.5,
    at_once_s=0.5,
    fence_s=10.0,
    late_s=0.3,
)


def test_there_is_a_broken_mover_for_every_rule() -> None:
    assert sorted(BROKEN) == [rule.number for rule in ALL_RULES]


@pytest.mark.parametrize("rule", sorted(BROKEN))
def test_a_mover_that_breaks_a_rule_fails_it_and_no_other(rule: str) -> None:
    report = run_conformance("testing.broken:make", options={"rule": rule}, sizes=SIZES)
    failed = {result.rule: result.reason + result.detail for result in report.of(Verdict.FAIL)}
    assert list(failed) == [rule], failed
    assert not report.ok

"""The rules of consumers are able to fail: each broken consumer fails its own rule and no other."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from pdhandoff import Consumer, HandoffId, Limits, Unannounced
from pdhandoff.testing import Report, Verdict
from pdhandoff.testing.peers import ALL_PEER_RULES, Patience, run_peer_conformance
from support.engines import LAYOUT
from support.tampering import Proxy
from testing.broken_consumers import BROKEN_CONSUMERS

pytestmark = pytest.mark.slow

LIMITS = Limits(
    liveness_s=4.0, heartbeat_s=0.5, handshake_s=2.5, lease_s=3.0, drain_s=1.0, unannounced_s=0.4, ready_s=3.0
)
PATIENCE = Patience(answer_s=12.0, quiet_s=0.2, slack_s=6.0, handshake_s=10.0, free_s=8.0, many=32, queued=3)
GROUPS = 5
RULES = sorted(BROKEN_CONSUMERS)


def check(rule: str) -> Report:
    """Run all rules against the consumer that breaks this one."""
    broken = BROKEN_CONSUMERS[rule]
    mover = broken.mover()
    policy = Unannounced.WAIT if broken.announced else Unannounced.ACCEPT
    try:
        with (
            Consumer(mover=mover, layout=LAYOUT, arena_bytes=1 << 20, limits=LIMITS, unannounced=policy) as consumer,
            Proxy(consumer.address, broken.tamper(mover)) as proxy,
        ):

            def announce(ids: Sequence[HandoffId]) -> None:
                for handoff in ids:
                    consumer.announce(handoff)
                consumer.statistics()

            return run_peer_conformance(
                str(proxy.address), announce=announce if broken.announced else None, patience=PATIENCE
            )
    finally:
        mover.close()


def test_there_is_a_broken_consumer_for_every_rule() -> None:
    assert [rule.number for rule in ALL_PEER_RULES] == RULES


@pytest.mark.parametrize("group", range(GROUPS))
def test_a_consumer_that_breaks_a_rule_fails_it_and_no_other(group: int) -> None:
    rules = RULES[group::GROUPS]
    with ThreadPoolExecutor(len(rules)) as pool:
        reports = dict(zip(rules, pool.map(check, rules), strict=True))
    failed = {
        rule: {result.rule: result.reason for result in report.of(Verdict.FAIL)} for rule, report in reports.items()
    }
    assert {rule: list(reasons) for rule, reasons in failed.items()} == {rule: [rule] for rule in rules}, failed
    assert [result.reason for report in reports.values() for result in report.of(Verdict.SKIP)] == []

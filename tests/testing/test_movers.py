"""The movers that come with pdhandoff and need a package of somebody else, where that is installed."""

from __future__ import annotations

import pytest

from pdhandoff.errors import PdHandoffError
from pdhandoff.testing import Verdict, run_conformance

pytestmark = pytest.mark.slow

MOVERS = ("mooncake", "nixl")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mover", MOVERS)
def test_a_mover_keeps_all_rules(mover: str) -> None:
    try:
        report = run_conformance(mover)
    except PdHandoffError as error:
        pytest.skip(f"{mover} cannot run here: {error.reason}")
    failed = {result.rule: result.reason + result.detail for result in report.of(Verdict.FAIL)}
    assert not failed, failed
    assert len(report.of(Verdict.PASS)) > len(report.results) - 10

"""A consumer and the kit in one process of its own: some movers' settings hold for a whole process.

python -m support.conforming_consumer MOVER RULES...   prints the rules that did not pass, as JSON
"""

from __future__ import annotations

import json
import sys

from pdhandoff import Consumer, Limits, Unannounced
from pdhandoff.testing import Verdict
from pdhandoff.testing.peers import Patience, run_peer_conformance
from support.engines import LAYOUT

__all__: list[str] = []


def main() -> None:
    """See the module's text."""
    mover, *rules = sys.argv[1:]
    with Consumer(
        mover=mover,
        layout=LAYOUT,
        arena_bytes=1 << 20,
        limits=Limits(drain_s=1.0),
        unannounced=Unannounced.ACCEPT,
    ) as consumer:
        patience = Patience(quiet_s=0.1, answer_s=30.0, free_s=60.0, many=32, queued=3)
        report = run_peer_conformance(str(consumer.address), rules=rules, patience=patience)
    others = {each.rule: each.reason for each in report.results if each.verdict is not Verdict.PASS}
    sys.stdout.write(json.dumps(others) + "\n")


if __name__ == "__main__":
    main()

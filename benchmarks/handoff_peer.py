"""The consumer process of `bench_handoff`: announces the ids that it is given and releases every arrival at once.

On standard input: a line of JSON, {"mover": name, "layout": name, "arena": bytes}, then lists of ids. On standard
output: its address, then a line for every list that has been announced, and one when all of it has arrived.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pdhandoff import Consumer, HandoffId, Limits

sys.path.insert(0, str(Path(__file__).parent))
from handoff_layouts import named_layout

__all__: list[str] = []


def main() -> None:
    """See the module's text."""
    setup = json.loads(sys.stdin.readline())
    layout = named_layout(setup["layout"])
    limits = Limits(announce_s=600.0)
    with Consumer(mover=setup["mover"], layout=layout, arena_bytes=setup["arena"], limits=limits) as consumer:
        say(str(consumer.address))
        for line in sys.stdin:
            tickets = [consumer.announce(HandoffId.parse(text)) for text in json.loads(line)]
            consumer.statistics()  # the announcements are in
            say("announced")
            for ticket in tickets:
                with ticket.wait(60):
                    pass
            say("arrived")


def say(text: str) -> None:
    """A line for the parent."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

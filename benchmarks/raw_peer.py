"""The memory that `bench_movers` writes into without any handoff: allocates, says its description in hex, waits.

python benchmarks/raw_peer.py MOVER BYTES
"""

from __future__ import annotations

import sys

from pdhandoff.engines.base import Extent
from pdhandoff.engines.registry import create

__all__: list[str] = []


def main() -> None:
    """See the module's text."""
    mover = create(sys.argv[1])
    memory = mover.allocate(int(sys.argv[2]))
    mover.register(memory)
    sys.stdout.write(mover.describe([Extent(memory.address, memory.length)]).hex() + f" {memory.address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    mover.close()


if __name__ == "__main__":
    main()

"""Sockets, threads and clocks around the pure core: producers and consumers that run.

Each endpoint has one thread for its links, its protocol machine and its mover, and one for work on bytes (gathers,
digests, proofs). Nothing that an engine calls waits for either.
"""

import logging

logging.getLogger("pdhandoff").addHandler(logging.NullHandler())

"""The conformance kit's other half: numbered rules that every consumer keeps, checked over the network.

`pdhandoff conformance --peer HOST:PORT` runs it; so does `run_peer_conformance`. The kit plays the producers.
"""

from __future__ import annotations

from pdhandoff.testing.peers.patience import Patience
from pdhandoff.testing.peers.rules import ALL_PEER_RULES
from pdhandoff.testing.peers.runner import run_peer_conformance

__all__ = ["ALL_PEER_RULES", "Patience", "run_peer_conformance"]

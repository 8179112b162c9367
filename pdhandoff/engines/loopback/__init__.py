"""The loopback mover: see `mover` for what it does, `files` for what is shared, `control` for the proof of death."""

from __future__ import annotations

from pdhandoff.engines.loopback.mover import LoopbackMover, LoopbackRegion, create

__all__ = ["LoopbackMover", "LoopbackRegion", "create"]

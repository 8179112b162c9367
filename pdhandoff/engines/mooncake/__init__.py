"""The Mooncake mover: see `mover` for what it does, `library` for what it needs, `sender` for how writes end."""

from __future__ import annotations

from pdhandoff.engines.mooncake.mover import MooncakeMover, MooncakeRegion, create

__all__ = ["MooncakeMover", "MooncakeRegion", "create"]

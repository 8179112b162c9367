"""The demo's model as a decode node's engine, and what it shares with engines for other models.

`create` is the factory that a decode node calls (`pdhandoff.demo.engine:create`).
"""

from pdhandoff.demo.engine.embedded import create
from pdhandoff.demo.engine.seam import Engine

__all__ = ["Engine", "create"]

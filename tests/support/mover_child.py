"""Another process with a mover, to write to and from, to be fenced, stopped and killed."""

from __future__ import annotations

import json
import sys
from typing import Any

from pdhandoff.engines.base import Extent, Transfer, TransferState, Writes
from support.child import ChildProcess, obey, say
from support.movers import Side, settle, soon
from support.transfer_engines import MOVERS

__all__ = ["Child"]


class Child(ChildProcess):
    """A process with one of `MOVERS`, made with `options`, and with some pages of registered memory."""

    def __init__(self, mover: str, pages: int = 8, **options: str) -> None:
        # UCX complains on standard error about peers that were killed
        super().__init__("support.mover_child", mover, str(pages), json.dumps(options), silent=mover == "nixl")
        self.address: int = self.hello["address"]
        self.identity = bytes.fromhex(self.hello["identity"])

    def connect(self, side: Side, *extents: Extent) -> None:
        """Let the child write into these extents of ours."""
        self.ask("connect", description=side.mover.describe(extents).hex())

    def describe(self, *pages: tuple[int, int]) -> bytes:
        """A grant of (first page, pages) extents of the child's memory."""
        return bytes.fromhex(self.ask("describe", extents=pages)["description"])

    def read(self, start: int, nbytes: int) -> bytes:
        """The child's memory."""
        return bytes.fromhex(self.ask("read", start=start, nbytes=nbytes)["bytes"])


class _Worker:
    """The child's state."""

    def __init__(self, mover: str, pages: int, options: dict[str, str]) -> None:
        self.side = Side(MOVERS[mover](**options), pages)
        self.peer: Any = None
        self.transfer: Transfer

    def _extents(self, pages: list[list[int]]) -> list[Extent]:
        return [self.side.extent(first, count) for first, count in pages]

    def describe(self, extents: list[list[int]]) -> dict[str, object]:
        return {"description": self.side.mover.describe(self._extents(extents)).hex()}

    def connect(self, description: str) -> dict[str, object]:
        self.peer = self.side.mover.connect(bytes.fromhex(description))
        return {"key": self.peer.key}

    def begin(self, destination: int, nbytes: int, value: int) -> dict[str, object]:
        """Start a write, and say so at once."""
        self.side.fill(value)
        self.transfer = self.side.mover.submit(self.peer, Writes.of((self.side.address, destination, nbytes)))
        return {}

    def finish(self) -> dict[str, object]:
        """Wait for the write that `begin` started."""
        status = settle(self.side.mover, self.transfer)
        return {"state": status.state.value, "reason": status.reason, "quiet": status.quiet}

    def write(self, destination: int, nbytes: int, value: int) -> dict[str, object]:
        self.begin(destination, nbytes, value)
        return self.finish()

    def late(self, destination: int, nbytes: int, value: int) -> dict[str, object]:
        """What a loopback write that was already running does: store through the mapping, with no check whatever."""
        self.side.fill(value)
        for local, source, length in self.peer.localise(Writes.of((self.side.address, destination, nbytes))):
            Side.store(local, source, length)
        return {}

    def storm(self, destination: int, nbytes: int) -> dict[str, object]:
        """Write without end: until the process is killed, or a write fails."""
        value = 0
        while True:
            value = value % 255 + 1
            answer = self.write(destination, nbytes, value)
            if answer["state"] != TransferState.DONE.value:
                return answer
            if value == 1:
                say({"storm": "on"})

    def read(self, start: int, nbytes: int) -> dict[str, object]:
        return {"bytes": self.side.bytes(start, nbytes).hex()}

    def fence(self, extents: list[list[int]]) -> dict[str, object]:
        me = self.side.mover.connect(self.side.mover.describe([]))
        self.side.mover.fence(me, self._extents(extents), soon())
        return {}

    def deregister(self) -> dict[str, object]:
        self.side.mover.deregister(self.side.region)
        return {}

    def close(self) -> dict[str, object]:
        self.side.mover.close()
        return {}


def main() -> None:
    """Obey until standard input ends."""
    mover, pages, options = sys.argv[1:]
    worker = _Worker(mover, int(pages), json.loads(options))
    obey(worker, {"address": worker.side.address, "identity": worker.side.mover.describe([]).hex()})
    worker.close()


if __name__ == "__main__":
    main()

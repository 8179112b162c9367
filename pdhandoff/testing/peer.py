"""The other side of a check, in a process of its own: `python -m pdhandoff.testing.peer NAME [OPTIONS [PLACE]]`.

OPTIONS is a JSON object of the mover's own options, PLACE says where memory is. Commands and answers are lines of JSON:
a command has `do`, the name of a method of `Desk`, and its arguments. One thread calls the mover. Bytes travel as
hexadecimal digits.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final, final

import msgspec

from pdhandoff.engines.base import Extent, Peer, Transfer, Writes
from pdhandoff.errors import PdHandoffError
from pdhandoff.testing.lines import serve
from pdhandoff.testing.loading import make_mover
from pdhandoff.testing.place import IN_CPU_MEMORY, Place
from pdhandoff.testing.rule import Violation
from pdhandoff.testing.side import Side
from pdhandoff.testing.storm import Storm

__all__ = ["Desk", "main"]

_VERBS: Final = frozenset(
    {
        "close",
        "connect",
        "describe",
        "digest",
        "fence",
        "fill",
        "hang_up",
        "open",
        "post",
        "read",
        "settle",
        "storm",
        "storm_count",
        "storm_end",
        "write",
    }
)


@final
class Desk:
    """Does what it is told with one mover at a time."""

    def __init__(self, name: str, options: dict[str, object], place: Place = IN_CPU_MEMORY) -> None:
        self._name = name
        self._options = options
        self._place = place
        self._side: Side | None = None
        self._peers: list[Peer] = []
        self._posted: list[Transfer] = []
        self._storm: Storm | None = None

    def act(self, command: dict[str, Any]) -> dict[str, Any]:
        """Answer one command."""
        verb = command.pop("do")
        if verb not in _VERBS:
            return {"problem": f"there is no command {verb!r}"}
        try:
            answer: dict[str, Any] = getattr(self, verb)(**command)
        except PdHandoffError as error:
            return {"refused": error.reason, "code": int(error.code)}
        except Violation as error:
            return {"problem": str(error)}
        except Exception as error:  # noqa: BLE001 - the process's boundary: whatever a mover raises goes to the check
            return {"problem": f"raised {type(error).__name__} ({error}), not MoverError"}
        return answer

    def work(self) -> bool:
        """Go on writing. False: there is nothing to do."""
        if self._storm is None:
            return False
        self._storm.step()
        return True

    @property
    def side(self) -> Side:
        """What `open` made."""
        if self._side is None:
            raise Violation("there is no mover: `open` comes first")
        return self._side

    def open(self, units: int, settle_s: float) -> dict[str, Any]:
        """A new mover, in place of the one there was."""
        self.hang_up()
        self._side = side = Side(make_mover(self._name, self._options), units, settle_s, self._place)
        return {
            "address": side.address,
            "identity": side.describe().hex(),
            "name": side.mover.name,
            "capabilities": msgspec.to_builtins(side.mover.capabilities),
        }

    def hang_up(self) -> dict[str, Any]:
        """Close the mover, if it is open, and forget everything."""
        self._storm = None
        self._posted.clear()
        self._peers.clear()
        side, self._side = self._side, None
        if side is not None:
            side.close()
        return {}

    def close(self) -> dict[str, Any]:
        """Close the mover and keep what is known of it. A storm goes on, as far as the mover lets it."""
        self.side.close()
        return {}

    def describe(self, extents: list[list[int]]) -> dict[str, Any]:
        """A grant of (address, length) extents."""
        return {"description": self.side.describe(*(Extent(*extent) for extent in extents)).hex()}

    def connect(self, description: str, extents: list[list[int]]) -> dict[str, Any]:
        """Connect; `peer` is a number to name the handle by."""
        granted = [Extent(*extent) for extent in extents]
        self._peers.append(self.side.connect(bytes.fromhex(description), granted))
        return {"peer": len(self._peers) - 1, "key": self._peers[-1].key}

    def write(self, peer: int, writes: list[list[int]]) -> dict[str, Any]:
        """Write (offset, destination, length) triples from our memory, and wait."""
        status = self.side.write(self._peers[peer], *self._triples(writes))
        return {"state": status.state.value, "reason": status.reason}

    def post(self, peer: int, writes: list[list[int]]) -> dict[str, Any]:
        """As `write`, without waiting."""
        self._posted.append(self.side.mover.submit(self._peers[peer], Writes.of(*self._triples(writes))))
        return {}

    def settle(self) -> dict[str, Any]:
        """Wait for everything that was posted."""
        posted, self._posted = self._posted, []
        return {"states": [self.side.finish(transfer).state.value for transfer in posted]}

    def _triples(self, writes: list[list[int]]) -> list[tuple[int, int, int]]:
        return [(self.side.address + offset, destination, length) for offset, destination, length in writes]

    def fill(self, value: int, start: int = 0, length: int | None = None) -> dict[str, Any]:
        """Set bytes of our memory."""
        self.side.fill(value, start, length)
        return {}

    def read(self, start: int = 0, length: int | None = None) -> dict[str, Any]:
        """Bytes of our memory."""
        return {"bytes": self.side.read(start, length).hex()}

    def digest(self, start: int = 0, length: int | None = None) -> dict[str, Any]:
        """Digest of bytes of our memory."""
        return {"digest": self.side.digest(start, length)}

    def fence(self, description: str, extents: list[list[int]], within_s: float) -> dict[str, Any]:
        """Fence a writer."""
        writer = self.side.mover.connect(bytes.fromhex(description))
        self.side.mover.fence(writer, [Extent(*extent) for extent in extents], time.monotonic() + within_s)
        return {}

    def storm(self, peer: int, destination: int, nbytes: int, *, forget: bool) -> dict[str, Any]:
        """Write our memory again and again until told otherwise. Answers when the first writes are under way."""
        self._storm = Storm(self.side, self._peers[peer], destination, nbytes, forget=forget)
        self._storm.step()
        return {}

    def storm_count(self) -> dict[str, Any]:
        """How far the storm is."""
        return {"attempts": self._storm.attempts if self._storm else 0, "done": self._storm.done if self._storm else 0}

    def storm_end(self) -> dict[str, Any]:
        """Begin no more writes."""
        self._storm = None
        return {}


def main() -> None:
    """Obey until standard input ends."""
    options = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    desk = Desk(sys.argv[1], options, Place.parse(sys.argv[3]) if len(sys.argv) > 3 else IN_CPU_MEMORY)
    serve(desk.act, desk.work)
    desk.act({"do": "hang_up"})


if __name__ == "__main__":
    main()

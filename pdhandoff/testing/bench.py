"""What a check works with: movers in this process, peers in others, and the sizes of the run."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from pdhandoff.engines.base import Extent, Mover, MoverCapabilities, TransferState
from pdhandoff.errors import MoverError
from pdhandoff.testing.lines import LineProcess
from pdhandoff.testing.loading import make_mover
from pdhandoff.testing.place import IN_CPU_MEMORY, Place
from pdhandoff.testing.rule import Sizes, Violation, require
from pdhandoff.testing.side import Side, unit_of

__all__ = ["Bench", "Other"]

_SLACK_S: Final = 10.0
"added to what a command may take"


@final
class Other:
    """A side in another process. Its methods are the commands of `pdhandoff.testing.peer`."""

    def __init__(self, process: LineProcess, sizes: Sizes, units: int, unit: int) -> None:
        self.process = process
        self._sizes = sizes
        self.unit = unit
        self.length = units * unit
        opened = self.ask("open", units=units, settle_s=sizes.settle_s)
        self.address: Final[int] = opened["address"]
        self.identity: Final = bytes.fromhex(opened["identity"])
        self.name: Final[str] = opened["name"]
        self.capabilities: Final[dict[str, Any]] = opened["capabilities"]
        self.healthy = True
        "whether its process can be used by the next check"
        self._stopped = False

    def ask(self, verb: str, **arguments: object) -> dict[str, Any]:
        """Send a command and give its answer. Raises MoverError where the mover refused, Violation where it failed."""
        return self._judge(verb, self.process.ask({"do": verb, **arguments}, self._sizes.settle_s + _SLACK_S))

    def tell(self, verb: str, **arguments: object) -> None:
        """Send a command whose answer `answer` gives later."""
        self.process.tell({"do": verb, **arguments})

    def answer(self, verb: str) -> dict[str, Any]:
        """The answer to what was told."""
        return self._judge(verb, self.process.hear(self._sizes.settle_s + _SLACK_S))

    @staticmethod
    def _judge(verb: str, answer: dict[str, Any]) -> dict[str, Any]:
        if "refused" in answer:
            raise MoverError(answer["code"], answer["refused"])
        if "problem" in answer:
            raise Violation(f"{verb} in the other process: {answer['problem']}")
        return answer

    def extent(self, first: int = 0, units: int = 1) -> Extent:
        """Some units of its memory."""
        return Extent(self.address + first * self.unit, units * self.unit)

    def whole(self) -> Extent:
        """All of its memory."""
        return Extent(self.address, self.length)

    def describe(self, *extents: Extent) -> bytes:
        """A grant of its memory."""
        return bytes.fromhex(self.ask("describe", extents=extents)["description"])

    def connect(self, description: bytes, extents: Sequence[Extent] = ()) -> int:
        """Let it connect. The number of its handle."""
        number: int = self.ask("connect", description=description.hex(), extents=extents)["peer"]
        return number

    def connect_to(self, owner: Side, *extents: Extent) -> int:
        """Let one of our sides grant extents to it. The number of its handle."""
        return self.connect(owner.describe(*extents), extents)

    def write(self, peer: int, *writes: tuple[int, int, int]) -> TransferState:
        """Let it write (offset in its memory, destination, length) triples, and wait. Refused counts as failed."""
        try:
            return TransferState(self.ask("write", peer=peer, writes=writes)["state"])
        except MoverError:
            return TransferState.FAILED

    def fill(self, value: int, start: int = 0, length: int | None = None) -> None:
        """Set bytes of its memory."""
        self.ask("fill", value=value, start=start, length=length)

    def read(self, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of its memory."""
        return bytes.fromhex(self.ask("read", start=start, length=length)["bytes"])

    def digest(self, start: int = 0, length: int | None = None) -> str:
        """Digest of bytes of its memory."""
        digest: str = self.ask("digest", start=start, length=length)["digest"]
        return digest

    def kill(self) -> None:
        """As `kill -9`, and wait until the process is gone."""
        self.healthy = False
        self.process.kill()

    def begin_to_kill(self) -> None:
        """As `kill`, without the wait: the process ends while the caller goes on."""
        self.healthy = False
        self.process.signal(signal.SIGKILL)

    def stop(self) -> None:
        """Let the whole process stand still."""
        self._stopped = True
        self.process.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Undo `stop`."""
        if self._stopped:
            self._stopped = False
            self.process.signal(signal.SIGCONT)


@final
class Bench:
    """Makes what one check after the other needs, and takes it back.

    Arguments:
        name: of the mover, as `make_mover` takes it.
        options: of the mover.
        sizes: of the run.
        place: where all memory is.
    """

    def __init__(self, name: str, options: Mapping[str, object], sizes: Sizes, place: Place = IN_CPU_MEMORY) -> None:
        self._name = name
        self.place: Final = place
        self._options = options
        self.sizes: Final = sizes
        probe = self.mover()
        self.capabilities: Final[MoverCapabilities] = probe.capabilities
        self.mover_name: Final = probe.name
        probe.close()
        self.unit: Final = unit_of(self.capabilities)
        self._sides: list[Side] = []
        self._others: list[Other] = []
        self._spare: list[LineProcess] = []

    def mover(self) -> Mover:
        """A new mover, which the caller closes."""
        return make_mover(self._name, self._options)

    def side(self, units: int = 8) -> Side:
        """A new mover in this process, with memory."""
        side = Side(self.mover(), units, self.sizes.settle_s, self.place)
        self._sides.append(side)
        return side

    def other(self, units: int = 8) -> Other:
        """A new mover in another process, with memory."""
        if self._spare:
            process = self._spare.pop()
        else:
            process = LineProcess("pdhandoff.testing.peer", self._name, json.dumps(self._options), self.place.spell())
        try:
            other = Other(process, self.sizes, units, self.unit)
        except BaseException:
            process.kill()
            raise
        self._others.append(other)
        return other

    def give_back(self) -> None:
        """Close what the check made. Raises what closing raises, after everything else is closed."""
        sides, self._sides = self._sides, []
        others, self._others = self._others, []
        try:
            for other in others:
                self._retire(other)
        finally:
            for side in sides:
                side.close()

    def _retire(self, other: Other) -> None:
        other.go_on()
        if not other.healthy:
            return
        other.healthy = False
        try:
            other.ask("hang_up")
        except (MoverError, Violation):
            other.process.kill()
            raise
        self._spare.append(other.process)

    def abandon(self) -> None:
        """After a check that failed: close what can be closed, and use none of its processes again."""
        for other in self._others:
            other.go_on()
            other.kill()
        self._others.clear()
        sides, self._sides = self._sides, []
        for side in sides:
            side.close()

    def close(self) -> None:
        """End the spare processes."""
        for process in self._spare:
            process.end()
        self._spare.clear()

    def same(self, got: bytes, wanted: bytes, what: str) -> None:
        """Raises Violation, naming the first byte that differs."""
        if got == wanted:
            return
        pairs = zip(got, wanted, strict=False)
        first = next((index for index, (one, two) in enumerate(pairs) if one != two), min(len(got), len(wanted)))
        wrong = sum(one != two for one, two in zip(got, wanted, strict=False))
        require(holds=False, sentence=f"{what}: {wrong} of {len(wanted)} bytes differ, the first at {first}")

"""A wrapper that makes a mover misbehave, by a script: for tests, and to try out what a deployment does with faults."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Final, final

import msgspec

from pdhandoff.engines.base import (
    Memory,
    MemoryKind,
    Mover,
    Peer,
    Region,
    Transfer,
    TransferState,
    TransferStatus,
    Writes,
)
from pdhandoff.engines.fault_rules import Fault, FaultStatistics, Rule, random_script
from pdhandoff.engines.forwarding import Forwarding
from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["Fault", "FaultStatistics", "Faulty", "FaultyTransfer", "Rule", "random_script"]


_PENDING: Final = TransferStatus(state=TransferState.PENDING, quiet=False)
_DONE: Final = TransferStatus(state=TransferState.DONE)


def _failed(reason: str, *, quiet: bool = True) -> TransferStatus:
    return TransferStatus(state=TransferState.FAILED, reason=reason, quiet=quiet)


@final
class FaultyTransfer:
    """A batch and what becomes of it."""

    def __init__(self, peer: Peer, parts: Sequence[Writes]) -> None:
        self.peer = peer
        self.parts = parts
        "what is given to the wrapped mover, one after the other"
        self.inner: list[Transfer] = []
        self.scratch: Region | None = None
        "altered bytes that the wrapped mover reads"
        self.polls_left = 0
        self.waits = False
        "for a test hook, or for polls"
        self.answer: TransferStatus | None = None
        "final, whatever the wrapped mover says"
        self.instead_of_done = _DONE


@final
class Faulty(Forwarding):
    """See the module. As thread-safe as the wrapped mover.

    A batch that is not passed on at once is not range-checked at once either: put a `Checked` around this wrapper where
    that matters.
    """

    def __init__(self, mover: Mover, script: Sequence[Rule] = ()) -> None:
        """Wrap a mover. Rules are tried in order."""
        super().__init__(mover)
        self._lock = threading.Lock()
        self._rules = tuple(script)
        self._uses = [0] * len(self._rules)
        self._submits = 0
        self._registers = 0
        self._fired: Counter[Fault] = Counter()
        self._held: list[FaultyTransfer] = []
        self._late: list[FaultyTransfer] = []
        self._regions: list[Region] = []

    def statistics(self) -> FaultStatistics:
        """A snapshot."""
        with self._lock:
            return FaultStatistics(
                submits=self._submits,
                registers=self._registers,
                fired=dict(self._fired),
                held=len(self._held),
                late=len(self._late),
            )

    def register(self, memory: Memory) -> Region:
        """See `Mover.register`. Raises MoverError where the script says so."""
        with self._lock:
            call, self._registers = self._registers, self._registers + 1
            if self._strike(call=call, peer=None, nbytes=memory.length, registering=True):
                raise MoverError(ErrorCode.MOVER_FAILED, f"registration {call} fails, as the script says")
            region = self._mover.register(memory)
            self._regions.append(region)
        return region

    def deregister(self, region: Region) -> None:
        """See `Mover.deregister`."""
        with self._lock:
            self._regions = [other for other in self._regions if other is not region]
        self._mover.deregister(region)

    def _strike(self, *, call: int, peer: str | None, nbytes: int, registering: bool) -> Rule | None:
        """The rule that decides this call, counted as used."""
        for index, rule in enumerate(self._rules):
            used_up = rule.times is not None and self._uses[index] >= rule.times
            if used_up or (rule.fault is Fault.REGISTER) is not registering:
                continue
            if rule.matches(call=call, peer=peer, nbytes=nbytes):
                self._uses[index] += 1
                self._fired[rule.fault] += 1
                return rule
        return None

    def submit(self, peer: Peer, writes: Writes) -> FaultyTransfer:
        """See `Mover.submit`."""
        transfer = FaultyTransfer(peer, (writes,))
        with self._lock:
            call, self._submits = self._submits, self._submits + 1
            rule = self._strike(call=call, peer=peer.key, nbytes=writes.nbytes, registering=False)
            if rule is not None:
                self._spoil(transfer, rule, call)
            if transfer.answer is None and not transfer.waits:
                transfer.inner = [self._mover.submit(peer, part) for part in transfer.parts]
        return transfer

    def _spoil(self, transfer: FaultyTransfer, rule: Rule, call: int) -> None:
        """Do to a batch what the rule says: answer for the wrapped mover, or let it wait, or change what is written."""
        reason = f"submit {call} meets {rule.fault.value!r}, as the script says"
        match rule.fault:
            case Fault.REFUSE:
                raise MoverError(ErrorCode.MOVER_FAILED, reason)
            case Fault.FAIL:
                transfer.answer = _failed(reason)
            case Fault.LATE:
                transfer.answer = _failed(reason, quiet=False)
                transfer.waits = True
                self._late.append(transfer)
            case Fault.HOLD:
                transfer.waits = True
                self._held.append(transfer)
            case Fault.DELAY | Fault.DROP:
                transfer.polls_left = max(rule.polls, 1)
                transfer.waits = True
            case _:
                pass
        self._rewrite(transfer, rule, reason)

    def _rewrite(self, transfer: FaultyTransfer, rule: Rule, reason: str) -> None:
        """Change what is given to the wrapped mover."""
        (writes,) = transfer.parts
        match rule.fault:
            case Fault.DROP:
                transfer.parts = ()
                transfer.instead_of_done = _failed(reason)
            case Fault.DUPLICATE:
                transfer.parts = (writes, writes)
            case Fault.PARTIAL:
                transfer.parts = (_first_bytes(writes, writes.nbytes // 2),)
                transfer.instead_of_done = _failed(reason)
            case Fault.FLIP if writes.nbytes:
                self._flip(transfer, writes, rule.byte % writes.nbytes)
            case _:
                pass

    def _flip(self, transfer: FaultyTransfer, writes: Writes, byte: int) -> None:
        """Send one byte from scratch memory, where it is altered, in place of the batch's own."""
        before = _first_bytes(writes, byte)
        index = len(before.length) - 1
        source, destination = (column[index] + before.length[index] for column in (writes.source, writes.destination))
        if not any(
            memory.kind is MemoryKind.CPU and memory.address <= source < memory.address + memory.length
            for memory in (region.memory for region in self._regions)
        ):
            raise MoverError(
                ErrorCode.CONFIG, f"a byte can be flipped in registered CPU memory only, not at {source:#x}"
            )
        scratch = self._mover.allocate(1)
        ctypes.memset(scratch.address, ctypes.string_at(source, 1)[0] ^ 1, 1)
        transfer.scratch = self._mover.register(scratch)
        flipped = Writes(*(column[:] for column in before))
        for column, value in zip(flipped, (scratch.address, destination, 1), strict=True):
            column.append(value)
        rest = writes.length[index] - before.length[index] - 1
        for column, value in zip(flipped, (source + 1, destination + 1, rest), strict=True):
            column.append(value)
        for column, tail in zip(flipped, writes, strict=True):
            column.extend(tail[index + 1 :])
        transfer.parts = (flipped,)

    def poll(self, transfer: Transfer) -> TransferStatus:
        """See `Mover.poll`."""
        faulty = _own(transfer)
        with self._lock:
            if faulty.answer is not None:
                return self._calm(faulty, faulty.answer)
            if faulty.waits:
                if faulty.polls_left:
                    faulty.polls_left -= 1
                    if not faulty.polls_left:
                        self._start(faulty)
                return _PENDING
            return self._conclude(faulty)

    def _calm(self, transfer: FaultyTransfer, answer: TransferStatus) -> TransferStatus:
        """A failed batch becomes quiet once the wrapped mover has finished with it."""
        if answer.quiet or transfer.waits or not self._finished(transfer):
            return answer
        transfer.answer = msgspec.structs.replace(answer, quiet=True)
        return transfer.answer

    def _finished(self, transfer: FaultyTransfer) -> bool:
        return all(self._mover.poll(inner).state is not TransferState.PENDING for inner in transfer.inner)

    def _conclude(self, transfer: FaultyTransfer) -> TransferStatus:
        """Ask the wrapped mover."""
        statuses = [self._mover.poll(inner) for inner in transfer.inner]
        if any(status.state is TransferState.PENDING for status in statuses):
            return _PENDING
        failed = [status for status in statuses if status.state is TransferState.FAILED]
        transfer.answer = failed[0] if failed else transfer.instead_of_done
        if transfer.scratch is not None:
            self._mover.deregister(transfer.scratch)
            transfer.scratch = None
        return transfer.answer

    def _start(self, transfer: FaultyTransfer) -> None:
        """Give a batch that waited to the wrapped mover."""
        transfer.waits = False
        try:
            for part in transfer.parts:
                transfer.inner.append(self._mover.submit(transfer.peer, part))
        except MoverError as error:
            transfer.answer = _failed(error.reason)

    def release_hold(self) -> int:
        """Start every batch that a HOLD rule keeps, oldest first. Returns how many."""
        with self._lock:
            held, self._held = self._held, []
            for transfer in held:
                self._start(transfer)
        return len(held)

    def land_late(self) -> int:
        """Start every batch that a LATE rule keeps, though it was reported as failed. Returns how many."""
        with self._lock:
            late, self._late = self._late, []
            for transfer in late:
                answer = transfer.answer
                self._start(transfer)
                transfer.answer = answer
        return len(late)

    def landed(self, transfer: Transfer) -> bool:
        """Whether everything of a batch that was given to the wrapped mover is done, and that is not nothing."""
        inner = _own(transfer).inner
        return bool(inner) and all(self._mover.poll(part).state is TransferState.DONE for part in inner)

    def release(self, transfer: Transfer) -> None:
        """See `Mover.release`. A batch that a rule keeps stays kept."""
        faulty = _own(transfer)
        with self._lock:
            for inner in faulty.inner:
                self._mover.release(inner)

    def close(self) -> None:
        """See `Mover.close`. What a rule keeps never lands."""
        with self._lock:
            for transfer in (*self._held, *self._late):
                transfer.answer = _failed("the mover was closed before this batch started")
            self._held.clear()
            self._late.clear()
        self._mover.close()


def _own(transfer: Transfer) -> FaultyTransfer:
    if not isinstance(transfer, FaultyTransfer):
        raise MoverError(ErrorCode.MISUSE, f"{type(transfer).__name__} is no transfer of this wrapper")
    return transfer


def _first_bytes(writes: Writes, nbytes: int) -> Writes:
    """The start of a batch, up to and including the write that holds byte `nbytes`, which is cut there."""
    triples: list[tuple[int, int, int]] = []
    for source, destination, length in zip(*writes, strict=True):
        triples.append((source, destination, min(length, nbytes)))
        if nbytes < length:
            break
        nbytes -= length
    return Writes.of(*triples)

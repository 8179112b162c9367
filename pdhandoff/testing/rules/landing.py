"""What has landed when, and where."""

from __future__ import annotations

import hashlib
import threading
from array import array
from typing import TYPE_CHECKING

from pdhandoff.engines.base import Peer, TransferState, Writes
from pdhandoff.errors import MoverError
from pdhandoff.testing.noise import noise
from pdhandoff.testing.rule import Rule, Violation, require

if TYPE_CHECKING:
    from pdhandoff.testing.bench import Bench
    from pdhandoff.testing.side import Side

__all__ = ["RULES"]

_DONE = TransferState.DONE


def _done_means_visible(bench: Bench) -> None:
    writer, owner = bench.other(4), bench.side(32)
    peer = writer.connect_to(owner, owner.whole())
    nbytes = 3 * bench.unit
    for value in range(1, 17):
        writer.fill(value)
        start = value * bench.unit
        require(writer.write(peer, (0, owner.address + start, nbytes)) is _DONE, f"write {value} is not done")
        bench.same(owner.read(start, nbytes), bytes((value,)) * nbytes, f"write {value}, seen right after DONE")


def _nothing_else_changes(bench: Bench) -> None:
    writer, other = bench.side(), bench.other()
    writer.fill(0xAA)
    other.fill(0x55)
    peer = writer.connect(other.describe(other.whole()), [other.whole()])
    expected = bytearray(b"\x55" * other.length)
    chance = noise(2)
    triples = []
    position = 1
    while position < other.length - 700:
        length = chance.randrange(33, 600) | 1
        triples.append((writer.address + chance.randrange(1000), other.address + position, length))
        expected[position : position + length] = b"\xaa" * length
        position += length + chance.randrange(1, 40)
    require(writer.write(peer, *triples).state is _DONE, "scattered writes of odd lengths are not done")
    bench.same(other.read(), bytes(expected), "memory in and between scattered writes")


def _tiny(bench: Bench) -> None:
    writer, other = bench.side(1), bench.other(2)
    data = noise(3).randbytes(bench.unit)
    writer.put(data)
    peer = writer.connect(other.describe(other.whole()), [other.whole()])
    places = [(start, 37 * (8 * length + start), length) for length in range(1, 10) for start in range(8)]
    triples = [(writer.address + start, other.address + place, length) for start, place, length in places]
    require(writer.write(peer, *triples).state is _DONE, "writes of 1 to 9 bytes are not done")
    got = other.read()
    for start, place, length in places:
        bench.same(got[place : place + length], data[start : start + length], f"{length} bytes from +{start}")


def _zero_length(bench: Bench) -> None:
    writer, other = bench.side(), bench.other()
    writer.fill(1)
    peer = writer.connect(other.describe(other.extent(0, 2)), [other.extent(0, 2)])
    nowhere = [(0, 0, 0), (3, 1 << 50, 0), (writer.address, other.address, 0)]
    for batch, what in (([], "an empty batch"), (nowhere, "a batch of writes of length 0")):
        try:
            state = writer.write(peer, *batch).state
        except MoverError as error:
            raise Violation(f"{what} was refused: {error.reason}") from error
        require(state is _DONE, f"{what} is not done")
    mixed = [nowhere[0], (writer.address, other.address + 64, 64), nowhere[1]]
    require(writer.write(peer, *mixed).state is _DONE, "a batch with writes of length 0 between others is not done")
    bench.same(other.read(0, 192), bytes(64) + b"\1" * 64 + bytes(64), "memory around a write among empty ones")


def _large(bench: Bench) -> None:
    units = -(-bench.sizes.large_bytes // bench.unit)
    writer, other = bench.side(units), bench.other(units)
    block = noise(4).randbytes(1 << 20)
    for start in range(0, bench.sizes.large_bytes, len(block)):
        writer.put(block[start >> 20 :][: bench.sizes.large_bytes - start], start)
    peer = writer.connect(other.describe(other.whole()), [other.whole()])
    state = writer.write(peer, (writer.address, other.address, bench.sizes.large_bytes)).state
    require(state is _DONE, f"one write of {bench.sizes.large_bytes} bytes is not done")
    require(other.digest() == writer.digest(), f"a write of {bench.sizes.large_bytes} bytes arrived changed")


def _many(bench: Bench) -> None:
    count, row = bench.sizes.descriptors, 24
    units = -(-count * row // bench.unit)
    writer, other = bench.side(units), bench.other(units)
    rows = noise(5).randbytes(count * row)
    writer.put(rows)
    order = list(range(count))
    noise(6).shuffle(order)
    peer = writer.connect(other.describe(other.whole()), [other.whole()])
    source = array("q", range(writer.address, writer.address + count * row, row))
    destination = array("q", (other.address + slot * row for slot in order))
    length = array("q", [row]) * count
    most = bench.capabilities.max_writes
    for start in range(0, count, most):
        part = slice(start, start + most)
        transfer = writer.mover.submit(peer, Writes(source[part], destination[part], length[part]))
        require(writer.finish(transfer).state is _DONE, f"a batch of {len(length[part])} writes is not done")
    landed = bytearray(count * row)
    for index, slot in enumerate(order):
        landed[slot * row : (slot + 1) * row] = rows[index * row : (index + 1) * row]
    expected = hashlib.blake2b(landed, digest_size=16).hexdigest()
    require(other.digest(0, count * row) == expected, f"{count} rows of {row} bytes did not all land in their places")


def _concurrent(bench: Bench) -> None:
    lanes, rounds = bench.sizes.threads, 8
    writer, other = bench.side(2 * lanes), bench.other(2 * lanes)
    writer.put(noise(7).randbytes(writer.length))
    peer = writer.connect(other.describe(other.whole()), [other.whole()])
    if bench.capabilities.thread_safe:
        _from_threads(bench, writer, peer, other.address, rounds)
    else:
        _from_one_thread(bench, writer, peer, other.address, rounds)
    require(other.digest() == writer.digest(), f"{lanes} writers at the same time did not get all bytes across")


def _parts(bench: Bench, lane: int, rounds: int) -> list[tuple[int, int]]:
    """Offset and length of what one lane writes, one after the other."""
    size = 2 * bench.unit // rounds
    return [(2 * lane * bench.unit + part * size, size) for part in range(rounds)]


def _from_threads(bench: Bench, writer: Side, peer: Peer, base: int, rounds: int) -> None:
    problems: list[str] = []

    def work(lane: int) -> None:
        try:
            for start, size in _parts(bench, lane, rounds):
                status = writer.write(peer, (writer.address + start, base + start, size))
                if status.state is not _DONE:
                    problems.append(f"thread {lane}: {status.reason}")
        except (MoverError, Violation) as error:
            problems.append(f"thread {lane}: {error}")

    threads = [threading.Thread(target=work, args=(lane,), daemon=True) for lane in range(bench.sizes.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(bench.sizes.settle_s)
        require(not thread.is_alive(), "a thread that writes does not come back: a call hangs")
    require(not problems, "; ".join(problems[:3]))


def _from_one_thread(bench: Bench, writer: Side, peer: Peer, base: int, rounds: int) -> None:
    lanes = [_parts(bench, lane, rounds) for lane in range(bench.sizes.threads)]
    for step in zip(*lanes, strict=True):
        transfers = [
            writer.mover.submit(peer, Writes.of((writer.address + start, base + start, size))) for start, size in step
        ]
        for transfer in transfers:
            status = writer.finish(transfer)
            require(status.state is _DONE, f"one of {len(transfers)} writes at the same time failed: {status.reason}")


RULES = (
    Rule(
        number="M-12",
        title="done means visible",
        must="Every byte of a transfer that is DONE MUST be visible to the owner of the memory at that moment.",
        check=_done_means_visible,
    ),
    Rule(
        number="M-13",
        title="nothing else changes",
        must="A transfer MUST NOT change a byte outside its destination ranges, however odd they are.",
        check=_nothing_else_changes,
    ),
    Rule(
        number="M-14",
        title="tiny writes",
        must="Writes of single bytes, from and to any address, MUST land as they are.",
        check=_tiny,
    ),
    Rule(
        number="M-15",
        title="empty writes",
        must="A write of length 0 MUST move nothing and be DONE, whatever its addresses are; so MUST an empty batch.",
        check=_zero_length,
    ),
    Rule(
        number="M-16",
        title="a large write",
        must="One write of many MiB MUST land completely.",
        check=_large,
    ),
    Rule(
        number="M-17",
        title="many writes",
        must="A hundred thousand small writes in batches of up to `max_writes` MUST land each in its place.",
        check=_many,
    ),
    Rule(
        number="M-18",
        title="writers at the same time",
        must="Transfers that run at the same time MUST NOT disturb each other; a mover that claims `thread_safe` "
        "MUST take them from many threads.",
        check=_concurrent,
    ),
)

"""Which memory may be read, written and granted."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from pdhandoff.engines.base import Extent, TransferState, Writes
from pdhandoff.errors import MoverError
from pdhandoff.testing.bytes_at import callers_memory, put_bytes, read_bytes
from pdhandoff.testing.noise import noise
from pdhandoff.testing.rule import Need, Rule, Violation, refuses, require

if TYPE_CHECKING:
    from pdhandoff.testing.bench import Bench, Other
    from pdhandoff.testing.side import Side

__all__ = ["RULES"]

_FAR = 1 << 40
_TRIES = 48
_CHANGES = 200


def _allocates(bench: Bench) -> None:
    mover = bench.mover()
    alignment = bench.unit
    first, second = (mover.allocate(nbytes, bench.place.kind, bench.place.device) for nbytes in (1, 3 * alignment))
    for memory, nbytes in ((first, 1), (second, 3 * alignment)):
        require(memory.length >= nbytes, f"{nbytes} bytes were asked for, and {memory.length} came")
        require(memory.address % alignment == 0, f"{memory.address:#x} is no multiple of {alignment} bytes")
        require(not any(read_bytes(memory, 0, nbytes)), "new memory is not zeroed")
        mover.register(memory)
    low, high = sorted((first, second))
    require(low.address + low.length <= high.address, "two allocations overlap")
    mover.close()


def _registers_any_memory(bench: Bench) -> None:
    owner, other = bench.side(), bench.other(4)
    raw = callers_memory(bench.place, 4 * bench.unit, bench.unit)
    owner.mover.register(raw)
    extent = Extent(raw.address + bench.unit, bench.unit)
    other.fill(7)
    state = other.write(other.connect_to(owner, extent), (0, extent.address, extent.length))
    require(state is TransferState.DONE, "a write into memory of the caller is not done")
    bench.same(read_bytes(raw, bench.unit, extent.length), b"\7" * extent.length, "memory of the caller")


def _callers_memory_is_a_source(bench: Bench) -> None:
    writer, other = bench.side(), bench.other()
    data = noise(1).randbytes(3 * bench.unit)
    raw = callers_memory(bench.place, len(data))
    put_bytes(raw, 0, data)
    writer.mover.register(raw)
    peer = writer.connect(other.describe(other.whole()), [other.whole()])
    state = writer.write(peer, (raw.address, other.address, len(data))).state
    require(state is TransferState.DONE, "a write from memory of the caller is not done")
    bench.same(other.read(0, len(data)), data, "what came from memory of the caller")


def _source_bounds(bench: Bench) -> None:
    writer, other = bench.side(), bench.other()
    writer.fill(1)
    peer = writer.connect(other.describe(other.whole()), [other.whole()])
    good = (writer.address, other.address, 64)
    for start, length in ((-64, 64), (-16, 32), (writer.length - 16, 32), (writer.length, 64), (_FAR, 64)):
        bad = (writer.address + start, other.address + bench.unit, length)
        for batch in ([bad], [good, bad]):
            with refuses(f"a write of {length} bytes from {start:+} of a registered region of {writer.length} bytes"):
                writer.mover.submit(peer, Writes.of(*batch))
    writer.mover.deregister(writer.region)
    writer.mover.deregister(writer.region)
    with refuses("a write from deregistered memory"):
        writer.mover.submit(peer, Writes.of(good))
    bench.same(other.read(), bytes(other.length), "memory that only refused batches name")


def _destination_bounds(bench: Bench) -> None:
    writer, other = bench.side(), bench.other()
    writer.fill(1)
    unit = bench.unit
    granted = [other.extent(1), other.extent(3)]
    peer = writer.connect(other.describe(*granted), granted)
    good = (writer.address, other.address + unit, 64)
    outside = (
        (unit - 1, 1),
        (unit - 16, 32),
        (2 * unit, 1),
        (2 * unit - 16, 32),
        (unit, 2 * unit),
        (unit, 3 * unit),
        (0, 8 * unit),
        (_FAR, 64),
        (-other.address, 64),
    )
    for start, length in outside:
        bad = (writer.address, other.address + start, length)
        for batch in ([bad], [good, bad]):
            with refuses(f"a write to {start:+} of {length} bytes, where {unit:+} and {3 * unit:+} were granted"):
                writer.mover.submit(peer, Writes.of(*batch))
    bench.same(other.read(), bytes(other.length), "memory that only refused batches name")


def _grants_do_not_add_up(bench: Bench) -> None:
    writer, other = bench.side(), bench.other()
    writer.fill(1)
    nothing = writer.connect(other.identity)
    first = writer.connect(other.describe(other.extent(0)), [other.extent(0)])
    second = writer.connect(other.describe(other.extent(4)), [other.extent(4)])
    for peer, unit, what in ((second, 0, "another grant's"), (first, 4, "another grant's"), (nothing, 0, "no grant's")):
        with refuses(f"a write into {what} extent"):
            writer.mover.submit(peer, Writes.of((writer.address, other.address + unit * bench.unit, 64)))
    bench.same(other.read(), bytes(other.length), "memory that only refused batches name")
    state = writer.write(first, (writer.address, other.address, 64)).state
    require(state is TransferState.DONE, "an earlier grant ended when another came")


def _grants_are_bounded(bench: Bench) -> None:
    owner = bench.side()
    loose = owner.mover.allocate(bench.unit, bench.place.kind, bench.place.device)
    for extents, what in (
        ([owner.extent(0), Extent(loose.address, bench.unit)], "memory that is not registered"),
        ([owner.extent(-1, 2)], "an extent that begins before registered memory"),
        ([owner.extent(7, 2)], "an extent that ends behind registered memory"),
        ([Extent(_FAR, bench.unit)], "an extent far from registered memory"),
        ([Extent(owner.address, 0)], "an empty extent"),
        ([Extent(owner.address, -bench.unit)], "an extent of negative length"),
    ):
        with refuses(f"a grant of {what}"):
            owner.mover.describe(extents)
    owner.mover.deregister(owner.region)
    with refuses("a grant of deregistered memory"):
        owner.mover.describe([owner.extent(0)])


def _alignment(bench: Bench) -> None:
    owner, other = bench.side(), bench.other()
    step = max(1, bench.capabilities.alignment)
    other.fill(6)
    extent = Extent(owner.address + 3 * step, step)
    state = other.write(other.connect_to(owner, extent), (0, extent.address, step))
    require(state is TransferState.DONE, f"an extent of {step} bytes, the alignment that is claimed, takes no write")
    expected = bytes(3 * step) + b"\6" * step
    bench.same(owner.read(), expected + bytes(owner.length - len(expected)), "memory around the smallest extent")
    if step > 1:
        for bad in (Extent(owner.address + step // 2, step), Extent(owner.address, step + step // 2)):
            with refuses(f"a grant of {bad.length} bytes at +{bad.address - owner.address}, not aligned to {step},"):
                owner.mover.describe([bad])


def _batch_bounds(bench: Bench) -> None:
    writer, other = bench.side(), bench.other()
    writer.fill(1)
    peer = writer.connect(other.describe(other.whole()), [other.whole()])
    most = bench.capabilities.max_writes
    zeros = array("q", [0]) * most
    status = writer.finish(writer.mover.submit(peer, Writes(zeros, zeros, zeros)))
    require(status.state is TransferState.DONE, f"a batch of {most} writes, as many as are claimed, is not done")
    zeros.append(0)
    with refuses(f"a batch of {len(zeros)} writes, one more than is claimed,"):
        writer.mover.submit(peer, Writes(zeros, zeros, zeros))
    source, destination, length = (array("q", [number]) for number in (writer.address, other.address, 64))
    with refuses("a batch with two lengths for one source"):
        writer.mover.submit(peer, Writes(source, destination, length * 2))
    with refuses("a batch with two destinations for one source"):
        writer.mover.submit(peer, Writes(source, destination * 2, length))
    with refuses("a write of negative length"):
        writer.mover.submit(peer, Writes(source, destination, array("q", [-64])))
    bench.same(other.read(), bytes(other.length), "memory that only refused batches name")


def _garbage(bench: Bench) -> None:
    writer, other = bench.side(), bench.other()
    real = other.describe(other.extent(0), other.extent(2))
    chance = noise(5)
    junk = [b"", b"\0", b"\xff" * 64, b"{}", chance.randbytes(1000), bytes(1 << 20), real + b"\0", real[1:]]
    junk.extend(real[: len(real) * cut // _TRIES] for cut in range(1, _TRIES))
    for description in junk:
        with refuses(f"a description that is garbage ({len(description)} bytes, {description[:8].hex()}...)"):
            writer.mover.connect(description)
    _good_description_works(writer, other, real)


def _impostors(bench: Bench) -> None:
    writer, other = bench.side(), bench.other()
    real = other.describe(other.extent(0), other.extent(2))
    for position in range(0, len(real), -(-len(real) // _CHANGES)):
        changed = bytearray(real)
        changed[position] ^= 1 << position % 8
        try:
            writer.mover.connect(bytes(changed))
        except MoverError:
            continue  # or it makes sense all the same: what it grants is the other side's affair
    _good_description_works(writer, other, real)


def _good_description_works(writer: Side, other: Other, description: bytes) -> None:
    try:
        peer = writer.connect(description, [other.extent(0)])
    except MoverError as error:
        raise Violation(f"after false descriptions, the true one is refused: {error.reason}") from error
    state = writer.write(peer, (writer.address, other.address, 64)).state
    require(state is TransferState.DONE, "after false descriptions, a write by the true one is not done")


def _strangers(bench: Bench) -> None:
    side = bench.side()
    stranger = _Stranger()
    calls: dict[str, Callable[[], object]] = {
        "submit": lambda: side.mover.submit(stranger, Writes.of()),
        "poll": lambda: side.mover.poll(stranger),
        "quiesce": lambda: side.mover.quiesce(stranger, 0.0),
        "fence": lambda: side.mover.fence(stranger, [side.extent(0)], 0.0),
    }
    for verb, call in calls.items():
        with refuses(f"{verb} of a handle that is not the mover's own"):
            call()


class _Stranger:
    key = "stranger"


RULES = (
    Rule(
        number="M-01",
        title="memory to land in",
        must="Memory from `allocate` MUST be zeroed, aligned, apart from all other, and accepted by `register`.",
        check=_allocates,
    ),
    Rule(
        number="M-02",
        title="any memory as destination",
        must="A mover that claims `registers_any_memory` MUST let peers write into registered memory of the caller.",
        check=_registers_any_memory,
        need=Need(capability="registers_any_memory", instead="the landing arena comes from the mover's `allocate`"),
    ),
    Rule(
        number="M-03",
        title="any memory as source",
        must="Registered memory of the caller MUST be readable as a source.",
        check=_callers_memory_is_a_source,
    ),
    Rule(
        number="M-04",
        title="source bounds",
        must="`submit` MUST refuse a batch that reads outside registered memory, with none of it written.",
        check=_source_bounds,
    ),
    Rule(
        number="M-05",
        title="destination bounds",
        must="`submit` MUST refuse a batch that writes outside the granted extents, with none of it written.",
        check=_destination_bounds,
    ),
    Rule(
        number="M-06",
        title="one handle, one grant",
        must="A handle MUST allow writes into the extents of its own description only, whatever else the peer granted.",
        check=_grants_do_not_add_up,
    ),
    Rule(
        number="M-07",
        title="grants of registered memory only",
        must="`describe` MUST refuse extents that are empty or not inside registered memory.",
        check=_grants_are_bounded,
    ),
    Rule(
        number="M-08",
        title="alignment",
        must="Extents on multiples of the claimed `alignment` MUST be granted exactly as they are, and others refused.",
        check=_alignment,
    ),
    Rule(
        number="M-09",
        title="batch bounds",
        must="A batch of `max_writes` MUST be taken; a longer one, columns of different lengths and negative "
        "lengths MUST be refused.",
        check=_batch_bounds,
    ),
    Rule(
        number="M-40",
        title="false descriptions",
        must="A description that was changed on its way, or lies about who wrote it, MUST NOT keep the true one from "
        "working.",
        check=_impostors,
    ),
    Rule(
        number="M-10",
        title="garbage",
        must="`connect` MUST refuse bytes that no `describe` wrote, by MoverError, and go on working.",
        check=_garbage,
    ),
    Rule(
        number="M-11",
        title="handles of others",
        must="Handles that the mover did not give out MUST be refused by MoverError.",
        check=_strangers,
    ),
)

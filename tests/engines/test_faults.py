"""Each fault does what its rule says, to the batches that the rule names, and to no other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from pdhandoff.engines.base import Memory, MemoryKind, Peer, TransferState, Writes
from pdhandoff.engines.faults import Fault, Faulty, FaultyTransfer, Rule, random_script
from pdhandoff.engines.loopback import create
from pdhandoff.errors import ErrorCode, MoverError
from support.movers import PAGE, Side, settle, soon

PENDING, DONE, FAILED = TransferState.PENDING, TransferState.DONE, TransferState.FAILED


class Scene:
    """A writer with a script, an owner, and a grant of all of its memory."""

    def __init__(self, *script: Rule) -> None:
        self.mover = Faulty(create(), script)
        self.writer = Side(self.mover)
        self.owner = Side(create())
        self.writer.put(bytes(1 + index % 255 for index in range(8 * PAGE)))
        self.peer: Peer = self.writer.connect(self.owner, self.owner.extent(0, 8))

    def submit(self, nbytes: int = PAGE, at: int = 0) -> FaultyTransfer:
        return self.mover.submit(self.peer, Writes.of((self.writer.address + at, self.owner.address + at, nbytes)))

    def landed(self, nbytes: int = PAGE, at: int = 0) -> bool:
        return self.owner.bytes(at, nbytes) == self.writer.bytes(at, nbytes)

    def untouched(self) -> bool:
        return not any(self.owner.bytes())


@pytest.fixture
def scene() -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(*script: Rule) -> Scene:
        made.append(Scene(*script))
        return made[-1]

    yield make
    while made:
        world = made.pop()
        world.mover.close()
        world.owner.mover.close()


MakeScene = Callable[..., Scene]


def test_fail_answers_at_once_and_nothing_lands(scene: MakeScene) -> None:
    world = scene(Rule(fault=Fault.FAIL))
    transfer = world.submit()
    status = world.mover.poll(transfer)
    assert (status.state, status.quiet) == (FAILED, True)
    assert "fail" in status.reason
    assert world.untouched()
    assert settle(world.mover, world.submit()).state is DONE  # one use, then as ever
    assert world.landed()


def test_drop_is_pending_for_so_many_polls_and_then_failed(scene: MakeScene) -> None:
    world = scene(Rule(fault=Fault.DROP, polls=3))
    transfer = world.submit()
    assert [world.mover.poll(transfer).state for _ in range(5)] == [PENDING] * 3 + [FAILED] * 2
    assert world.untouched()


def test_delay_starts_after_so_many_polls(scene: MakeScene) -> None:
    world = scene(Rule(fault=Fault.DELAY, polls=2))
    transfer = world.submit()
    assert world.mover.poll(transfer).state is PENDING
    assert world.untouched()
    assert world.mover.poll(transfer).state is PENDING
    assert settle(world.mover, transfer).state is DONE
    assert world.landed()


def test_hold_starts_when_released(scene: MakeScene) -> None:
    world = scene(Rule(fault=Fault.HOLD, times=2))
    held = [world.submit(), world.submit(at=PAGE)]
    assert [world.mover.poll(transfer).state for transfer in held * 2] == [PENDING] * 4
    assert world.untouched()
    assert world.mover.statistics().held == 2
    assert world.mover.release_hold() == 2
    assert [settle(world.mover, transfer).state for transfer in held] == [DONE] * 2
    assert world.landed(2 * PAGE)
    assert world.mover.release_hold() == 0


def test_partial_lands_the_first_half(scene: MakeScene) -> None:
    world = scene(Rule(fault=Fault.PARTIAL))
    source, destination = world.writer.address, world.owner.address
    writes = Writes.of((source, destination, 100), (0, 0, 0), (source + 200, destination + 200, 300))
    assert settle(world.mover, world.mover.submit(world.peer, writes)).state is FAILED
    assert world.landed(100)
    assert world.landed(100, at=200)
    assert not any(world.owner.bytes(300))


def test_duplicate_writes_twice(scene: MakeScene) -> None:
    world = scene(Rule(fault=Fault.DUPLICATE))
    transfer = world.submit()
    assert settle(world.mover, transfer).state is DONE
    assert len(transfer.inner) == 2
    assert world.landed()


def test_late_fails_without_being_quiet_and_lands_when_told(scene: MakeScene) -> None:
    world = scene(Rule(fault=Fault.LATE))
    transfer = world.submit()
    first = world.mover.poll(transfer)
    assert (first.state, first.quiet) == (FAILED, False)
    assert world.untouched()
    world.mover.release(transfer)
    assert world.mover.statistics().late == 1
    assert not world.mover.landed(transfer)
    assert world.mover.land_late() == 1
    assert world.mover.landed(transfer)
    assert world.landed()
    last = world.mover.poll(transfer)
    assert (last.state, last.reason, last.quiet) == (FAILED, first.reason, True)
    assert world.mover.poll(transfer) == last
    assert world.mover.land_late() == 0


def test_a_late_write_that_is_refused_keeps_its_first_reason(scene: MakeScene) -> None:
    world = scene(Rule(fault=Fault.LATE))
    transfer = world.submit(9 * PAGE)
    first = world.mover.poll(transfer)
    assert world.mover.land_late() == 1
    last = world.mover.poll(transfer)
    assert (last.state, last.reason, last.quiet) == (FAILED, first.reason, True)
    assert world.untouched()


def test_a_late_write_into_fenced_memory_lands_nowhere(scene: MakeScene) -> None:
    world = scene(Rule(fault=Fault.LATE), Rule(fault=Fault.HOLD))
    late, held = world.submit(), world.submit(at=PAGE)
    owner = world.owner
    owner.mover.fence(owner.connect(world.writer), [owner.extent(0, 2)], soon())
    world.mover.land_late()
    world.mover.release_hold()
    assert not world.mover.landed(late)
    assert settle(world.mover, held).state is FAILED
    assert world.untouched()


@pytest.mark.parametrize("byte", [0, 1, 99, 100, 101, 199, 200 + 7, 400 + 399, 7_000_000])
def test_flip_changes_one_bit_of_one_byte_and_says_done(scene: MakeScene, byte: int) -> None:
    world = scene(Rule(fault=Fault.FLIP, byte=byte))
    source, destination = world.writer.address, world.owner.address
    lengths, starts = (100, 0, 100, 200, 400), (0, 0, 100, 300, 600)
    writes = Writes.of(*((source + at, destination + at, size) for at, size in zip(starts, lengths, strict=True)))
    before = world.writer.bytes()
    assert settle(world.mover, world.mover.submit(world.peer, writes)).state is DONE
    moved = [at + index for at, size in zip(starts, lengths, strict=True) for index in range(size)]
    wrong = [at for at in moved if world.owner.bytes(at, 1) != before[at : at + 1]]
    assert wrong == [moved[byte % 800]]
    assert world.owner.bytes(wrong[0], 1)[0] ^ before[wrong[0]] == 1
    assert {at for at, value in enumerate(world.owner.bytes()) if value} <= set(moved)
    assert world.writer.bytes() == before


def test_flip_of_nothing_is_nothing(scene: MakeScene) -> None:
    world = scene(Rule(fault=Fault.FLIP))
    assert settle(world.mover, world.submit(0)).state is DONE
    assert world.untouched()


def test_flip_needs_a_source_that_it_can_read(scene: MakeScene) -> None:
    world = scene(Rule(fault=Fault.FLIP))
    world.mover.deregister(world.writer.region)
    with pytest.raises(MoverError) as caught:
        world.submit()
    assert caught.value.code is ErrorCode.CONFIG


def test_refuse_raises_with_nothing_started(scene: MakeScene) -> None:
    world = scene(Rule(fault=Fault.REFUSE))
    with pytest.raises(MoverError) as caught:
        world.submit()
    assert caught.value.code is ErrorCode.MOVER_FAILED
    assert world.untouched()


def test_registration_fails_where_the_script_says(scene: MakeScene) -> None:
    world = scene(Rule(fault=Fault.REGISTER, call=2, times=None))
    second = world.mover.allocate(PAGE)
    world.mover.register(second)  # 0 was the writer's own memory
    with pytest.raises(MoverError, match="registration 2"):
        world.mover.register(second)
    world.mover.register(second)
    assert settle(world.mover, world.submit()).state is DONE
    assert world.mover.statistics().registers == 4


def test_rules_choose_by_number_peer_and_size(scene: MakeScene) -> None:
    world = scene(
        Rule(fault=Fault.FAIL, call=1),
        Rule(fault=Fault.FAIL, peer="somebody else", times=None),
        Rule(fault=Fault.FAIL, min_bytes=2000, max_bytes=3000, times=None),
    )
    sizes = [10, 10, 10, 1999, 2000, 3000, 3001]
    states = [settle(world.mover, world.submit(size)).state for size in sizes]
    assert states == [DONE, FAILED, DONE, DONE, FAILED, FAILED, DONE]
    statistics = world.mover.statistics()
    assert (statistics.submits, statistics.fired) == (7, {Fault.FAIL: 3})


def test_rules_choose_by_peer_key(scene: MakeScene) -> None:
    world = scene()
    chosen = Faulty(create(), [Rule(fault=Fault.FAIL, peer=world.peer.key, times=None)])
    writer, other = Side(chosen), Side(create())
    for owner, state in ((world.owner, FAILED), (other, DONE)):
        peer = writer.connect(owner, owner.extent(0))
        assert writer.write(peer, (writer.address, owner.address, 8)).state is state
    chosen.close()
    other.mover.close()


def test_a_held_write_to_a_peer_that_ended_fails(scene: MakeScene) -> None:
    world = scene(Rule(fault=Fault.HOLD))
    transfer = world.submit()
    world.owner.mover.close()
    world.mover.release_hold()
    assert settle(world.mover, transfer).state is FAILED


def test_a_held_write_that_turns_out_to_be_out_of_range_fails(scene: MakeScene) -> None:
    world = scene(Rule(fault=Fault.HOLD))
    transfer = world.submit(9 * PAGE)
    world.mover.release_hold()
    status = world.mover.poll(transfer)
    assert status.state is FAILED
    assert "nothing was written" in status.reason


def test_closing_ends_what_is_held(scene: MakeScene) -> None:
    world = scene(Rule(fault=Fault.HOLD), Rule(fault=Fault.LATE))
    kept = [world.submit(), world.submit()]
    world.mover.close()
    for transfer in kept:
        status = world.mover.poll(transfer)
        assert (status.state, status.quiet) == (FAILED, True)
    assert (world.mover.release_hold(), world.mover.land_late()) == (0, 0)
    assert world.untouched()


def test_memory_of_a_gpu_is_never_read_to_flip_a_byte() -> None:
    class Pretender:
        """A mover that takes any memory."""

        def register(self, memory: Memory) -> object:
            class Region:
                def __init__(self) -> None:
                    self.memory = memory

            return Region()

    class Somebody:
        key = "somebody"

    mover = Faulty(Pretender(), [Rule(fault=Fault.FLIP)])  # type: ignore[arg-type]
    mover.register(Memory(PAGE, PAGE, MemoryKind.CUDA))
    with pytest.raises(MoverError, match="CPU memory"):
        mover.submit(Somebody(), Writes.of((PAGE, PAGE, 1)))


def test_a_random_script_depends_on_its_seed_alone() -> None:
    scripts = [random_script(random.Random(seed), submits=200, rate=0.3) for seed in (1, 1, 2)]
    assert scripts[0] == scripts[1] != scripts[2]
    assert 30 < len(scripts[0]) < 90
    assert Fault.REGISTER not in {rule.fault for rule in scripts[0]}
    assert random_script(random.Random(1), submits=50, rate=0.0) == ()
    only = random_script(random.Random(1), submits=50, rate=1.0, faults=[Fault.HOLD])
    assert [(rule.call, rule.fault) for rule in only] == [(call, Fault.HOLD) for call in range(50)]

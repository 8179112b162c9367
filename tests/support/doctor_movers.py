"""Movers with one thing wrong each, by `support.doctor_movers:NAME`: the doctor's children find them by that name."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path
from typing import final

from pdhandoff.engines.base import Mover, MoverCapabilities, Peer, Transfer, Writes
from pdhandoff.engines.faults import Fault, Faulty, Rule
from pdhandoff.engines.forwarding import Forwarding
from pdhandoff.engines.loopback import create
from pdhandoff.errors import ErrorCode, MoverError


def sound() -> Mover:
    return create()


def chatty() -> Mover:
    os.write(1, b"a transfer engine prints to standard output\n")
    return create()


def register_fails() -> Mover:
    return Faulty(create(), [Rule(fault=Fault.REGISTER)])


def flips_a_bit() -> Mover:
    return Faulty(create(), [Rule(fault=Fault.FLIP, byte=1234)])


def flips_a_bit_later() -> Mover:
    return Faulty(create(), [Rule(fault=Fault.FLIP, byte=7, call=1)])


def write_fails() -> Mover:
    return Faulty(create(), [Rule(fault=Fault.FAIL)])


def never_settles() -> Mover:
    return Faulty(create(), [Rule(fault=Fault.HOLD)])


@final
class _Stray(Forwarding):
    """Writes one byte more than it is told to."""

    def submit(self, peer: Peer, writes: Writes) -> Transfer:
        transfer = self._mover.submit(peer, writes)
        for local, source, length in peer.localise(writes):  # type: ignore[attr-defined]
            ctypes.memmove(local + length, source, 1)
        return transfer


def strays() -> Mover:
    return _Stray(create())


@final
class _NoProofs(Forwarding):
    """Can neither quiesce nor fence."""

    @property
    def capabilities(self) -> MoverCapabilities:
        return MoverCapabilities()


@final
class _Renamed(Forwarding):
    """Calls itself by another name."""

    @property
    def name(self) -> str:
        return "other"


def renamed() -> Mover:
    return _Renamed(create())


def no_proofs() -> Mover:
    return _NoProofs(create())


def refuses(*, why: str = "nothing") -> Mover:
    raise MoverError(ErrorCode.CONFIG, f"no card: {why}")


def lacks_a_library() -> Mover:
    raise MoverError(
        ErrorCode.CONFIG,
        "cannot be loaded (libibverbs.so.1: cannot open shared object file: No such file or directory)",
    )


def dies() -> Mover:
    sys.stderr.write("the driver is not there\n")
    sys.stderr.flush()
    os.abort()


def hangs() -> Mover:
    threading.Event().wait()
    return create()


def tells_and_hangs() -> Mover:
    unfinished = Path(os.environ["PIDS"]).with_suffix(".part")
    unfinished.write_text(str(os.getpid()), encoding="utf-8")
    unfinished.rename(os.environ["PIDS"])
    return hangs()

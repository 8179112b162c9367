"""Ends processes that have a session of their own, and whatever they have started in it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

__all__ = ["end_groups"]

_POLL_S: Final = 0.05


def end_groups(leaders: Iterable[int], *, within_s: float, reap: Callable[[], object] = lambda: None) -> None:
    """Send SIGTERM to each leader, wait until its group is empty, and kill what is left then.

    Args:
        leaders: process ids of leaders of a session, which nobody else has reaped.
        within_s: how long they have to end by themselves.
        reap: called again and again; collects the exit status of those that are this process's children.
    """
    left = set(leaders)
    for leader in left:
        with suppress(ProcessLookupError):
            _ask(leader)
    _wait(left, within_s, reap)
    for leader in left:
        with suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
    _wait(left, within_s, reap)


def _ask(leader: int) -> None:
    """SIGTERM to the leader, which ends the rest in good order; to the rest where the leader is gone already."""
    try:
        leads = os.getpgid(leader) == leader  # else the number belongs to somebody else by now
    except ProcessLookupError:
        leads = False
    if leads:
        os.kill(leader, signal.SIGTERM)
    else:
        os.killpg(leader, signal.SIGTERM)


def _wait(left: set[int], within_s: float, reap: Callable[[], object]) -> None:
    """Remove from `left` the groups that are empty, until none is left or the time is over."""
    deadline, pause = time.monotonic() + within_s, threading.Event()
    while True:
        reap()
        for leader in list(left):
            try:
                os.killpg(leader, 0)
            except ProcessLookupError:
                left.discard(leader)
        if not left or time.monotonic() >= deadline:
            return
        pause.wait(_POLL_S)

"""Ids of handoffs that the consumer's front end waits for: a check cannot go far without."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Final, final

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.ids import HandoffId

__all__ = ["Announced", "SkipRule", "announce_command"]

_COMMAND_S: Final = 60.0


class SkipRule(Exception):
    """A rule cannot be checked in this run: the sentence says why."""


@final
class Announced:
    """Where announced ids come from.

    Args:
        given: announced before the run; each is used once.
        announce: called with new ids, and returns when the consumer waits for them.
    """

    def __init__(self, given: Sequence[HandoffId], announce: Callable[[Sequence[HandoffId]], None] | None) -> None:
        self._given = list(given)
        self._announce = announce
        self.accepts = False
        "the consumer takes offers that nobody announced"
        self.why_not = "give ids by --handoff, or a command by --announce"
        "what to do about it when there are none"

    @property
    def endless(self) -> bool:
        """Whether there are as many as one likes."""
        return self.accepts or self._announce is not None

    @property
    def silent(self) -> bool:
        """Whether nothing was said about announcing."""
        return not self._given and self._announce is None

    def need_endless(self) -> None:
        """Raises SkipRule unless there are as many as one likes."""
        if not self.endless:
            raise SkipRule(f"announced handoffs without end are needed: {self.why_not}")

    def take(self, count: int = 1) -> list[HandoffId]:
        """So many ids that an offer may come for. Raises SkipRule when there are not enough."""
        if self._announce is not None:
            ids = [HandoffId.mint() for _ in range(count)]
            self._announce(ids)
            return ids
        if len(self._given) >= count:
            ids, self._given = self._given[:count], self._given[count:]
            return ids
        if self.accepts:
            return [HandoffId.mint() for _ in range(count)]
        raise SkipRule(
            f"{count} announced handoff{'s are' if count > 1 else ' is'} needed and {len(self._given)} left: "
            f"{self.why_not}"
        )


def announce_command(command: Sequence[str]) -> Callable[[Sequence[HandoffId]], None]:
    """Announces by a command that gets the ids, in hexadecimal digits, as its last arguments.

    What is returned raises LocalError when the command fails.
    """

    def announce(ids: Sequence[HandoffId]) -> None:
        try:
            subprocess.run([*command, *map(str, ids)], check=True, timeout=_COMMAND_S, capture_output=True, text=True)
        except (OSError, subprocess.SubprocessError) as error:
            words = getattr(error, "stderr", None) or str(error)
            raise LocalError(
                ErrorCode.CONFIG, f"the handoffs could not be announced: {words.strip()[-500:]}"
            ) from error

    return announce

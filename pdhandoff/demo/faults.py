"""What the demo breaks on purpose: a byte in flight, or a whole process at a named step."""

from __future__ import annotations

import os
import signal
from typing import Final, final

from pdhandoff.observe.steps import Step
from pdhandoff.observe.trace import Recorder, Value

__all__ = ["CONSUMER_STEPS", "PRODUCER_STEPS", "KillAt"]

PRODUCER_STEPS: Final = (Step.OFFER, Step.GRANT, Step.GATHER, Step.WRITE, Step.COMMIT)
"steps at which the prefill process can be killed"
CONSUMER_STEPS: Final = (Step.LANDED, Step.READY, Step.CONVERT, Step.DECODE)
"steps at which the decode process can be killed"


@final
class KillAt:
    """A recorder that kills its own process, without any clean-up, when it is told of a step. None: it only records."""

    def __init__(self, recorder: Recorder, step: str | None) -> None:
        self._recorder = recorder
        self._step = step

    def add(self, name: str, track: str, start_ns: int, end_ns: int, **args: Value) -> None:
        """See `Recorder.add`."""
        self._maybe_kill(name)
        self._recorder.add(name, track, start_ns, end_ns, **args)

    def instant(self, name: str, track: str, **args: Value) -> None:
        """See `Recorder.instant`."""
        self._maybe_kill(name)
        self._recorder.instant(name, track, **args)

    def _maybe_kill(self, name: str) -> None:
        if name == self._step:
            os.kill(os.getpid(), signal.SIGKILL)

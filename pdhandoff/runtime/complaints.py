"""What a listener writes to the log about peers that it turned away: enough to find a mistake, never a flood."""

from __future__ import annotations

import logging
from typing import Final, final

from pdhandoff.errors import ErrorCode

__all__ = ["Complaints"]

_LOG: Final = logging.getLogger("pdhandoff.runtime")
_PAUSE_S: Final = 10.0
"between two lines about one kind of problem"
_MOST_KINDS: Final = 64
"a peer chooses the code of its goodbye"


@final
class Complaints:
    """Of one endpoint. Connections that were only opened and closed again are health checks, and no problem."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}
        self._unsaid: dict[int, int] = {}

    def about(self, host: str, code: int, reason: str, now: float) -> None:
        """A connection from `host` came to nothing."""
        if code == ErrorCode.LINK_LOST or (code not in self._last and len(self._last) >= _MOST_KINDS):
            return
        last = self._last.get(code)
        if last is not None and now - last < _PAUSE_S:
            self._unsaid[code] = self._unsaid.get(code, 0) + 1
            return
        self._last[code] = now
        _LOG.warning(
            "no link with %s: %.300r (%d more like it were not logged)", host, reason, self._unsaid.pop(code, 0)
        )

"""The vLLM servers: who answers, who has least to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

from pdhandoff_router.refusals import Refusal

__all__ = ["Server", "Servers"]


@final
class Server:
    """One server.

    Attributes:
        url: without a trailing slash.
        prefill: URL of the server that prefills for it; None: it does so itself.
        problem: why it is not used; empty: it is.
        busy: requests that this router has there.
    """

    def __init__(self, url: str, prefill: str | None = None) -> None:
        self.url = url
        self.prefill = prefill
        self.problem = ""
        self.busy = 0

    @property
    def name(self) -> str:
        """Host and port."""
        return self.url.partition("://")[2]


@final
class Servers:
    """A group of servers that can stand in for one another.

    Args:
        kind: names them in errors.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.members: list[Server] = []

    def configure(self, wanted: Sequence[tuple[str, str | None]]) -> None:
        """Take a new list of (URL, URL of its prefill server)."""
        former = {(each.url, each.prefill): each for each in self.members}
        self.members = [former.get(each) or Server(*each) for each in wanted]

    def usable(self) -> bool:
        """At least one is."""
        return any(not each.problem for each in self.members)

    @contextmanager
    def lease(self) -> Iterator[Server]:
        """Use the one with least to do. One that did not answer its last probe is tried only if none did.

        Raises:
            Refusal: 503, there is none.
        """
        if not self.members:
            raise Refusal(503, f"no {self.kind} server is configured", code="NO_SERVER")
        best = min(self.members, key=lambda each: (bool(each.problem), each.busy))
        best.busy += 1
        try:
            yield best
        finally:
            best.busy -= 1

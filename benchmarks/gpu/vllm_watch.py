"""The connector under measurement, watched: it remembers where rows lie, so that they can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pdhandoff_vllm.connector import PDHandoffConnector

__all__ = ["SEEN", "Seen", "WatchedConnector"]


class Seen:
    """What both sides of the connector saw: they share one process here."""

    def __init__(self) -> None:
        self.caches: dict[str, Any] = {}
        "vLLM's name of a layer -> its cache"
        self.blocks: dict[str, Sequence[int]] = {}
        "handoff -> block table of its request"
        self.layout: Any = None
        "what the producer offers"


SEEN: Final = Seen()


class WatchedConnector(PDHandoffConnector):
    """Notes the caches at registration, and each marked request's block table at its end."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """As vLLM calls it."""
        super().register_kv_caches(kv_caches)
        SEEN.caches = dict(kv_caches)
        if self._worker is not None:
            SEEN.layout = self._worker.layout

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM calls it."""
        mark = (request.kv_transfer_params or {}).get("pdhandoff")
        if isinstance(mark, Mapping):
            SEEN.blocks[str(mark["handoff"])] = list(block_ids[0])
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(request, block_ids)
        return answer

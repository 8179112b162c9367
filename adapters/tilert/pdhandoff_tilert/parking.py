"""Memory for requests that have landed while another one decodes: rows in the engine's own layout, to be copied."""

from __future__ import annotations

import threading
from typing import NamedTuple, final

import torch
from torch import Tensor

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.native import Native
from pdhandoff.planner import Placement
from pdhandoff.runtime.arrival import Arrival
from pdhandoff_tilert.caches import CacheShape, Part

__all__ = ["Facts", "ParkedRows", "Parking", "facts_of"]


class Facts(NamedTuple):
    """What the decode loop must know of rows, beside the rows."""

    prompt_tokens: int
    mtp_cold: bool
    "no rows of the draft layer came along"
    last_token: int | None
    "the prompt's last token as the prefill side says; None: it did not"


def facts_of(arrival: Arrival, longest: int) -> Facts:
    """What came with the rows.

    Args:
        arrival: complete.
        longest: tokens that the engine's caches hold.

    Raises:
        LocalError: the prompt is longer, or a part of it did not move: this engine holds one request at a time, so
            nothing of it is here already.
    """
    if not 0 < arrival.prompt_tokens <= longest:
        raise LocalError(
            ErrorCode.TOO_LARGE,
            f"handoff {arrival.handoff} brings {arrival.prompt_tokens} tokens, and the caches hold 1 to {longest}: "
            "give the consumer this engine's max_seq_len, so that it refuses the offer",
        )
    if arrival.start_token:
        raise LocalError(
            ErrorCode.MISUSE,
            f"handoff {arrival.handoff} brings tokens {arrival.start_token} and on, and this engine keeps no prefix "
            "of an earlier request: announce it without start_token",
        )
    last = arrival.value("last_token") if "last_token" in arrival.attachments else None
    return Facts(arrival.prompt_tokens, arrival.mtp_cold, last)


@final
class ParkedRows:
    """One request's rows, dense: `parts[part]` is uint8 [layer, token, row bytes]. Made by `Parking.take`."""

    def __init__(self, parking: Parking, shape: CacheShape, tokens: int, *, device: torch.device, pinned: bool) -> None:
        self._parking = parking
        self.tokens = tokens
        self.facts: Facts | None = None
        "set when the rows are in"
        self.nbytes = shape.layers * tokens * sum(shape.row_bytes)
        self._parts: tuple[Tensor, ...] | None = tuple(
            torch.zeros(
                shape.layers, tokens, shape.row_bytes[part], dtype=torch.uint8, device=device, pin_memory=pinned
            )
            for part in Part
        )
        if device.type == "cuda":
            # conversions run on a stream of their own, and must not be zeroed over
            torch.cuda.current_stream(device).synchronize()

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """By part. Raises LocalError when they were given back."""
        parts = self._parts
        if parts is None:
            raise LocalError(ErrorCode.MISUSE, "these parked rows were dropped: they are no state of any request")
        return parts

    def placements(self) -> dict[str, Placement]:
        """Component -> where its rows are; valid for tokens below `tokens`."""
        index, latent, rope = ([layer.data_ptr() for layer in part] for part in self.parts)
        return {
            "mla_latent": Placement(1, {"latent": latent, "rope": rope}),
            "index_key": Placement(1, {"": index}),
        }

    def give_back(self) -> None:
        """Free the memory. Idempotent, from any thread."""
        with self._parking.lock:
            held, self._parts = self._parts is not None, None
            if held:
                self._parking.used_bytes -= self.nbytes


@final
class Parking:
    """A budget for parked rows. Takes memory as it is needed, never more than the budget unless it must.

    Args:
        shape: of the engine's caches.
        budget_bytes: for all parked requests together.
        device: where to park; conversions must be able to write there.
        pinned: host memory that GPUs copy from at full speed.
        native: what converts there; None: whatever the consumer converts with.
    """

    def __init__(
        self,
        shape: CacheShape,
        budget_bytes: int,
        device: torch.device,
        *,
        pinned: bool = False,
        native: Native | None = None,
    ) -> None:
        if budget_bytes < 0:
            raise LocalError(ErrorCode.CONFIG, f"park_bytes {budget_bytes}: give 0 or more")
        self.native = native
        self.lock = threading.Lock()
        self.used_bytes = 0
        self.longest = min(shape.index_length, shape.rows_length)
        "tokens that the caches hold"
        self._shape = shape
        self._budget_bytes = budget_bytes
        self._device = device
        self._pinned = pinned

    def take(self, tokens: int) -> ParkedRows | None:
        """Zeroed memory for that many tokens; None: there is no room now."""
        nbytes = self._shape.layers * tokens * sum(self._shape.row_bytes)
        with self.lock:
            if self.used_bytes + nbytes > self._budget_bytes:
                return None
            self.used_bytes += nbytes
        try:
            return ParkedRows(self, self._shape, tokens, device=self._device, pinned=self._pinned)
        except torch.OutOfMemoryError:
            with self.lock:
                self.used_bytes -= nbytes
            return None

    def must_take(self, tokens: int) -> ParkedRows:
        """The same beyond the budget, for the one request that is being injected.

        Raises:
            LocalError: the device has not that much memory.
        """
        with self.lock:
            self.used_bytes += self._shape.layers * tokens * sum(self._shape.row_bytes)
        try:
            return ParkedRows(self, self._shape, tokens, device=self._device, pinned=self._pinned)
        except torch.OutOfMemoryError as error:
            with self.lock:
                self.used_bytes -= self._shape.layers * tokens * sum(self._shape.row_bytes)
            raise LocalError(
                ErrorCode.TOO_LARGE,
                f"no memory on {self._device} to convert {tokens} tokens in: give the engine shorter prompts, or "
                "convert on a device with more memory",
            ) from error

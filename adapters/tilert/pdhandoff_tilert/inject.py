"""Landed rows into a live engine: parked first while another request decodes, or converted straight into its caches.

Rows are converted once, whatever the number of devices. Where conversions can write the caches themselves, they go
into the first device that holds a part; elsewhere into parked memory. From there every device that holds the part gets
a copy. Nothing else of a cache is written: no other row, and no tensor of length 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, final

import torch
from torch import Tensor

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.runtime.arrival import Arrival
from pdhandoff_tilert.caches import LiveCaches
from pdhandoff_tilert.parking import Facts, ParkedRows, Parking, facts_of

__all__ = ["CacheInjector", "CallInjector", "InjectCache", "Injector"]

Rows = tuple[Tensor, Tensor, Tensor]


class InjectCache(Protocol):
    """`generator.inject_cache` of TileRT 0.1.6.post3."""

    def __call__(self, layer_caches: list[Rows], start_pos: int, end_pos: int) -> object:
        """Copy bf16 rows into the caches: index keys [n, 128], latents [n, 512], rotary keys [n, 64] of every layer."""


class Injector(Protocol):
    """How rows get into one engine."""

    def park(self, arrival: Arrival) -> ParkedRows | Arrival:
        """Convert and release the arrival, or return it where there is no room to park it."""

    def inject(self, parked: object) -> Facts:
        """Make it the state of the live caches; release it, however that ends.

        Raises:
            LocalError: it was dropped, does not fit, or is nothing that `park` returned. The caches then hold no
                request's state.
        """

    def keep_draft_row(self, position: int) -> Callable[[], None]:
        """Remember the draft layer's row; the result puts it back."""


@final
class CacheInjector:
    """Writes the live tensors.

    Args:
        live: the engine's caches.
        parking: memory for requests that wait.
        layers: target layers of the model; what follows is draft layers.
        direct: conversions may write the caches themselves.
    """

    def __init__(self, live: LiveCaches, parking: Parking, *, layers: int, direct: bool) -> None:
        self._live = live
        self._parking = parking
        self._layers = layers
        self._direct = direct

    def park(self, arrival: Arrival) -> ParkedRows | Arrival:
        """See `Injector.park`."""
        return _park(self._parking, arrival)

    def inject(self, parked: object) -> Facts:
        """See `Injector.inject`."""
        if isinstance(parked, Arrival) and self._direct:
            with parked, torch.inference_mode():
                facts = facts_of(parked, self._parking.longest)
                parked.convert_into(self._live.placements(), native=self._parking.native)
                self._spread(facts)
                self._finish()
        else:
            rows, facts = _rows(self._parking, parked)
            try:
                with torch.inference_mode():
                    self._copy(rows)
                self._finish()
            finally:
                rows.give_back()
        return facts

    def keep_draft_row(self, position: int) -> Callable[[], None]:
        """See `Injector.keep_draft_row`."""
        rows = [
            tensor[0, position]
            for holders in self._live.holders.values()
            for _, tensors in holders
            for tensor in tensors[self._layers :]
        ]
        kept = [row.clone() for row in rows]

        def put_back() -> None:
            with torch.inference_mode():
                for row, old in zip(rows, kept, strict=True):
                    row.copy_(old)
            self._finish()

        return put_back

    def _copy(self, rows: ParkedRows) -> None:
        """Parked rows to every device that holds them."""
        for part, holders in self._live.holders.items():
            for _, tensors in holders:
                for tensor, source in zip(tensors, rows.parts[part], strict=True):
                    _bytes(tensor, rows.tokens).copy_(source, non_blocking=True)

    def _spread(self, facts: Facts) -> None:
        """The first device's rows to the other devices. Draft rows that did not come are zeroed: they are nobody's."""
        for holders in self._live.holders.values():
            (_, first), *others = holders
            if facts.mtp_cold:
                for tensor in first[self._layers :]:
                    _bytes(tensor, facts.prompt_tokens).zero_()
            for _, tensors in others:
                for tensor, source in zip(tensors, first, strict=True):
                    _bytes(tensor, facts.prompt_tokens).copy_(_bytes(source, facts.prompt_tokens), non_blocking=True)

    def _finish(self) -> None:
        """Copies are queued on the devices' streams, and the engine runs on streams of its own."""
        for device in self._live.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


@final
class CallInjector:
    """Leaves the injection to the engine's own `inject_cache`, for caches that are not as `caches` knows them.

    Args:
        inject_cache: the engine's.
        parking: memory for requests that wait; here every request is converted there.
    """

    def __init__(self, inject_cache: InjectCache, parking: Parking) -> None:
        self._inject_cache = inject_cache
        self._parking = parking

    def park(self, arrival: Arrival) -> ParkedRows | Arrival:
        """See `Injector.park`."""
        return _park(self._parking, arrival)

    def inject(self, parked: object) -> Facts:
        """See `Injector.inject`."""
        rows, facts = _rows(self._parking, parked)
        try:
            index, latent, rope = (part.view(torch.bfloat16) for part in rows.parts)
            self._inject_cache(list(zip(index, latent, rope, strict=True)), 0, facts.prompt_tokens)
        finally:
            rows.give_back()
        return facts

    def keep_draft_row(self, position: int) -> Callable[[], None]:  # noqa: ARG002 - the interface's
        """Rows that cannot be addressed cannot be kept: the result does nothing."""
        return lambda: None


def _park(parking: Parking, arrival: Arrival) -> ParkedRows | Arrival:
    try:
        facts = facts_of(arrival, parking.longest)
    except LocalError:
        arrival.release()
        raise
    rows = parking.take(facts.prompt_tokens)
    if rows is None:
        return arrival
    _convert(arrival, parking, rows, facts)
    return rows


def _rows(parking: Parking, parked: object) -> tuple[ParkedRows, Facts]:
    """Converted rows, whatever `park` returned."""
    if isinstance(parked, ParkedRows):
        if parked.facts is None:
            raise LocalError(ErrorCode.MISUSE, "these rows were never converted: inject what park returned")
        return parked, parked.facts
    if isinstance(parked, Arrival):
        with parked:
            facts = facts_of(parked, parking.longest)
            rows = parking.must_take(facts.prompt_tokens)
            _convert(parked, parking, rows, facts)
        return rows, facts
    raise LocalError(ErrorCode.MISUSE, f"{type(parked).__name__} cannot be injected: inject what park returned")


def _convert(arrival: Arrival, parking: Parking, rows: ParkedRows, facts: Facts) -> None:
    """Convert, release the arrival; the rows are given back where that fails."""
    try:
        with arrival:
            arrival.convert_into(rows.placements(), native=parking.native)
    except BaseException:
        rows.give_back()
        raise
    rows.facts = facts


def _bytes(tensor: Tensor, tokens: int) -> Tensor:
    """The first rows of a cache [1, length, elements] as uint8 [tokens, row bytes]."""
    return tensor[0, :tokens].view(torch.uint8)

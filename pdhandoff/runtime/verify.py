"""The payload digest of landed rows, compared with what the producers sent. It is computed on the consumer's worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import final

from pdhandoff.errors import PdHandoffError
from pdhandoff.ids import HandoffId
from pdhandoff.layouts import Layout
from pdhandoff.native import Native
from pdhandoff.planner import entry_component, landing_parts, stepped_component
from pdhandoff.protocol.book import Landing, Slot
from pdhandoff.protocol.consumer import ConsumerCore
from pdhandoff.protocol.effects import Verify
from pdhandoff.protocol.manifest import Manifest
from pdhandoff.protocol.spans import IntervalSet
from pdhandoff.runtime.early import Early
from pdhandoff.runtime.meeting import ProducerLink
from pdhandoff.runtime.worker import Worker

__all__ = ["Verifier", "shard_digest"]

Summed = Mapping[int, Sequence[tuple[range, int]]]
"entry -> digests of rows as they were when they went on into the decode engine's caches"


@final
class Verifier:
    """Answers every `Verify` of the core. What was converted early is judged by what the conversion has read."""

    def __init__(
        self,
        *,
        core: ConsumerCore,
        worker: Worker,
        native: Callable[[], Native],
        links: Mapping[HandoffId, Mapping[int, ProducerLink]],
        early: Early,
        clock: Callable[[], float],
        act: Callable[[], None],
    ) -> None:
        self._core = core
        self._worker = worker
        self._native = native
        self._links = links
        self._early = early
        self._clock = clock
        self._act = act

    def verify(self, effect: Verify) -> None:
        """Compare digests. The core holds the memory until the answer."""
        handoff, generation = effect.handoff, effect.generation
        record = self._core.book.records.get(generation)
        if not effect.digests or record is None:
            self._core.verified(handoff, generation, self._clock())
            return
        manifests = self._core.manifests(handoff)
        extents = dict(record.extents)
        links = dict(self._links.get(handoff, {}))
        self._early.when_idle(handoff, lambda: self._compare(effect, manifests, extents, links))

    def _compare(
        self,
        effect: Verify,
        manifests: Mapping[int, Manifest],
        extents: Mapping[Slot, tuple[Landing, ...]],
        links: Mapping[int, ProducerLink],
    ) -> None:
        early = self._early.done(effect.handoff)
        summed: dict[int, Summed] = {shard: early.digests(shard) if early else {} for shard in effect.digests}

        def compute() -> dict[int, bytes]:
            return {
                shard: shard_digest(
                    self._native(), links[shard].layout, manifests[shard], shard, extents, summed=summed[shard]
                )
                for shard in effect.digests
            }

        self._worker.run(compute, lambda result: self._verified(effect, result))

    def _verified(self, effect: Verify, result: dict[int, bytes] | PdHandoffError) -> None:
        now = self._clock()
        handoff, generation = effect.handoff, effect.generation
        if isinstance(result, PdHandoffError):
            self._core.verification_failed(handoff, generation, 0, f"could not be checked: {result.reason}", now)
        elif result == effect.digests:
            self._core.verified(handoff, generation, now)
        else:
            shard = next(shard for shard, digest in effect.digests.items() if result[shard] != digest)
            reason = f"what landed of shard {shard} is not what was sent: no token is decoded from it"
            self._core.verification_failed(handoff, generation, shard, reason, now)
        self._act()


def shard_digest(
    native: Native,
    layout: Layout,
    manifest: Manifest,
    shard: int,
    extents: Mapping[Slot, tuple[Landing, ...]],
    *,
    summed: Summed | None = None,
) -> bytes:
    """Digest of everything that one shard has landed, but for rows whose digests are known: 8 bytes, little-endian."""
    known = summed or {}
    total = sum(digest for sums in known.values() for _, digest in sums)
    for destination in manifest.destinations:
        for part in landing_parts(manifest, destination, extents.get(Slot(shard, destination), ())):
            entry = manifest.entries[part.entry]
            component = stepped_component(entry_component(layout.component(entry.component), entry), part.step)
            for tokens in _outside(part.tokens, known.get(part.entry, ())):
                total += native.digest(
                    component,
                    layers=entry.layers,
                    bases=part.placement.bases,
                    pages=part.pages,
                    tokens=tokens,
                    heads=range(entry.head_start, entry.head_start + entry.heads),
                )
    return (total % (1 << 64)).to_bytes(8, "little")


def _outside(tokens: range, known: Sequence[tuple[range, int]]) -> list[range]:
    return IntervalSet((each.start, each.stop) for each, _ in known).gaps(tokens.start, tokens.stop)

"""`Native` by a compiled library: CPU memory, or the memory of CUDA devices."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, final

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.native.base import Finished, Gathered, GatherPart
from pdhandoff.native.checks import check_convert
from pdhandoff.native.jobs import Jobs
from pdhandoff.native.library import Library, Unsupported

if TYPE_CHECKING:
    from pdhandoff.layouts.descriptor import Component
    from pdhandoff.planner.conversions import Conversion
    from pdhandoff.planner.copies import CopyBlock, CopyPlan
    from pdhandoff.planner.pages import PageTable
    from pdhandoff.planner.placement import Placement

__all__ = ["Compiled"]

_WAIT_S: Final = 60.0
"how long a conversion or a digest may take on a device"
_NS: Final = 1_000_000_000


@final
class Compiled:
    """All calls release the interpreter lock while they work, and may come from any thread.

    `cpu` works on memory of this process and is done on return. `cuda` works on addresses that the devices can reach
    (device memory, or host memory that CUDA has pinned), on the device that holds the destination; gathers run on the
    caller's stream, everything else on a stream of the library's own, and is done on return.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._jobs = Jobs(library)

    @property
    def name(self) -> str:
        """The library: cpu or cuda."""
        return self._library.name

    def copy(self, plan: CopyPlan) -> None:
        """Execute raw copies, see `Native.copy`."""
        ffi = self._library.ffi
        blocks = ffi.new("pdh_copy_block[]", len(plan.blocks))
        kept = [_fill_block(ffi, blocks[index], block) for index, block in enumerate(plan.blocks)]
        self._library.check(self._library.functions.pdh_copy(blocks, len(plan.blocks)))
        kept.clear()

    def gather(self, parts: Sequence[GatherPart], tokens: range, *, digest: bool, stream: int = 0) -> Gathered:
        """Rows into landing form, see `Native.gather`."""
        jobs = [self._jobs.gather(part, tokens, digest=digest) for part in parts]
        return self._submit(jobs, stream)

    def convert(
        self,
        conversion: Conversion,
        *,
        source_bases: Sequence[int],
        source_pages: PageTable,
        destination_at: Placement,
        destination_pages: PageTable,
        tokens: range,
        zero_until: int,
        digest_layers: Sequence[int] | None = None,
    ) -> int:
        """Convert landed rows, see `Native.convert`. On the CPU, what has no kernel is left to the reference."""
        bases = check_convert(
            conversion,
            source_bases=source_bases,
            source_pages=source_pages,
            destination_at=destination_at,
            destination_pages=destination_pages,
            tokens=tokens,
            zero_until=zero_until,
            digest_layers=digest_layers,
        )
        try:
            job = self._jobs.convert(
                conversion,
                source_bases=source_bases,
                source_pages=source_pages,
                destination_bases=bases,
                destination_pages=destination_pages,
                tokens=tokens,
                zero_until=zero_until,
                digest_layers=digest_layers,
            )
            return self._done([job])
        except Unsupported:
            if self.name != "cpu":
                raise
            with contextlib.suppress(ModuleNotFoundError):
                from pdhandoff.native.reference import Reference

                return Reference().convert(
                    conversion,
                    source_bases=source_bases,
                    source_pages=source_pages,
                    destination_at=destination_at,
                    destination_pages=destination_pages,
                    tokens=tokens,
                    zero_until=zero_until,
                    digest_layers=digest_layers,
                )
            raise

    def digest(
        self,
        component: Component,
        *,
        layers: Sequence[int],
        bases: Mapping[str, Sequence[int]],
        pages: PageTable,
        tokens: range,
        heads: range | None = None,
    ) -> int:
        """Digest of rows, see `Native.digest`."""
        wanted = range(component.head_start, component.head_start + component.heads) if heads is None else heads
        job = self._jobs.digest(component, layers=layers, bases=bases, pages=pages, tokens=tokens, heads=wanted)
        return self._done([job])

    def _done(self, jobs: Sequence[tuple[Any, list[Any]]]) -> int:
        work = self._submit(jobs, None)
        work.wait(_WAIT_S)
        return work.digest

    def _submit(self, jobs: Sequence[tuple[Any, list[Any]]], stream: int | None) -> Gathered:
        library = self._library
        made, kept = self._jobs.array(jobs)
        ticket = library.ffi.new("pdh_ticket *")
        status = library.functions.pdh_submit(made, len(jobs), stream or 0, stream is None, ticket)
        library.check(status)
        kept.clear()
        return Finished(int(ticket.digest)) if ticket.done else _Launched(library, ticket)


@final
class _Launched:
    """Work that a device does."""

    def __init__(self, library: Library, ticket: Any) -> None:
        self._library = library
        self._ticket = ticket

    def query(self) -> bool:
        if not self._ticket.done:
            self._library.check(self._library.functions.pdh_poll(self._ticket))
        return bool(self._ticket.done)

    def wait(self, timeout_s: float = _WAIT_S) -> None:
        if not self._ticket.done:
            self._library.check(self._library.functions.pdh_wait(self._ticket, int(timeout_s * _NS)))
        if not self._ticket.done:
            raise LocalError(
                ErrorCode.INTERNAL,
                f"{self._library.name} kernels: not done after {timeout_s:g} s: the stream is held up by other work",
            )

    @property
    def digest(self) -> int:
        if not self._ticket.done:
            raise LocalError(ErrorCode.MISUSE, "the digest is not known yet: ask query or wait first")
        return int(self._ticket.digest)

    def __del__(self) -> None:
        self._library.functions.pdh_release(self._ticket)


def _fill_block(ffi: Any, made: Any, block: CopyBlock) -> list[Any]:
    names = ("source_bases", "destination_bases", "source", "destination", "length")
    columns = [ffi.from_buffer("int64_t[]", getattr(block, name)) for name in names]
    for name, column in zip(names, columns, strict=True):
        setattr(made, name, column)
    made.layers, made.copies, made.count = len(block.layers), len(block.length), block.count
    made.source_step, made.destination_step = block.source_step, block.destination_step
    return columns

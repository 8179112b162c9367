"""Components, page tables and conversions as the structures of csrc/pdh_layout.h."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.layouts.descriptor import Component, Element, Plane, RopeOrder
from pdhandoff.native.base import GatherPart
from pdhandoff.native.checks import check_bases, check_gather, check_table, local_heads
from pdhandoff.native.keys import head_keys
from pdhandoff.native.library import Library, Unsupported
from pdhandoff.planner.conversions import COPY, Conversion, ConversionPart
from pdhandoff.planner.pages import PageTable

__all__ = ["Jobs"]

_NO_NULL: Final = -(1 << 63)
_KEPT: Final = 256
"pairs of components whose descriptions are kept"
_ELEMENTS: Final = {
    Element.BF16: "PDH_BF16",
    Element.F16: "PDH_F16",
    Element.F32: "PDH_F32",
    Element.E4M3: "PDH_E4M3",
    Element.UE8M0: "PDH_UE8M0",
    Element.UE8M0X4: "PDH_UE8M0X4",
}
_SCALES: Final = frozenset({Element.F32, Element.UE8M0, Element.UE8M0X4})
_PLAIN: Final = frozenset({Element.BF16, Element.F16, Element.F32})
_MOST_STEPS: Final = 4
_HADAMARD_ELEMENTS: Final = 128


class _Parts(NamedTuple):
    """What a job says about planes: arrays of the C interface, and their lengths."""

    parts: Any
    part_count: int
    row: Any
    row_count: int
    zero: Any
    zero_count: int
    owners: tuple[object, ...]
    "what this was made from: kept alive, because it is found by identity"


@final
class Jobs:
    """Makes jobs for one library, and remembers what it made of components."""

    def __init__(self, library: Library) -> None:
        self._ffi = library.ffi
        self._c = library.functions
        self._known: dict[tuple[int, ...], _Parts] = {}

    def array(self, jobs: Sequence[tuple[Any, list[Any]]]) -> tuple[Any, list[Any]]:
        """Jobs as one C array, and what has to stay alive while it is read."""
        made = self._ffi.new("pdh_job[]", len(jobs))
        kept: list[Any] = []
        for index, (job, keep) in enumerate(jobs):
            made[index] = job[0]
            kept += keep
        return made, kept

    def gather(self, part: GatherPart, tokens: range, *, digest: bool) -> tuple[Any, list[Any]]:
        """A part of `Native.gather`. Raises LocalError where its two sides do not fit."""
        here, there = check_gather(part, tokens)
        source, destination = part.source, part.destination
        known = self._remembered((source, destination), lambda: self._copied(source, destination))
        job, keep = self._job(known, part.layers, part.heads, tokens, tokens.stop)
        bases = _columns(source, part.source_bases)
        keep += self._side(job.source, source, bases, part.source_pages, used=here, heads=part.heads)
        columns = [part.destination_bases]
        keep += self._side(job.destination, destination, columns, part.destination_pages, used=there, heads=part.heads)
        if digest:
            keep.append(self._keys(job, destination, part.layers, part.heads))
        return job, keep

    def digest(
        self,
        component: Component,
        *,
        layers: Sequence[int],
        bases: Mapping[str, Sequence[int]],
        pages: PageTable,
        tokens: range,
        heads: range,
    ) -> tuple[Any, list[Any]]:
        """`Native.digest`. Raises LocalError where bases, pages or heads do not fit."""
        check_bases(component, layers, bases)
        local_heads(component, heads)
        used = check_table(component, pages, tokens)
        known = self._remembered((component,), lambda: self._hashed(component))
        job, keep = self._job(known, layers, heads, tokens, tokens.stop)
        keep += self._side(job.source, component, _columns(component, bases), pages, used=used, heads=heads)
        keep.append(self._keys(job, component, layers, heads))
        return job, keep

    def convert(
        self,
        conversion: Conversion,
        *,
        source_bases: Sequence[int],
        source_pages: PageTable,
        destination_bases: Mapping[str, Sequence[int]],
        destination_pages: PageTable,
        tokens: range,
        zero_until: int,
        digest_layers: Sequence[int] | None,
    ) -> tuple[Any, list[Any]]:
        """`Native.convert`, once `checks.check_convert` has passed. Raises LocalError for a pair that has no kernel."""
        source, destination = conversion.source, conversion.destination
        owners = (source, destination, *conversion.parts)
        known = self._remembered(owners, lambda: self._converted(conversion))
        job, keep = self._job(known, conversion.layers, conversion.heads, tokens, zero_until)
        used = check_table(source, source_pages, tokens)
        keep += self._side(job.source, source, [source_bases], source_pages, used=used, heads=conversion.heads)
        there = check_table(destination, destination_pages, range(tokens.start, max(tokens.stop, zero_until)))
        columns = _columns(destination, destination_bases)
        keep += self._side(job.destination, destination, columns, destination_pages, used=there, heads=conversion.heads)
        if digest_layers is not None:
            keep.append(self._keys(job, source, digest_layers, conversion.heads))
        return job, keep

    def _job(
        self, known: _Parts, layers: Sequence[int], heads: range, tokens: range, zero_stop: int
    ) -> tuple[Any, list[Any]]:
        job = self._ffi.new("pdh_job *")
        job.parts, job.part_count = known.parts, known.part_count
        job.row, job.row_count = known.row, known.row_count
        job.zero, job.zero_count = known.zero, known.zero_count
        job.token_start, job.token_stop, job.zero_stop = tokens.start, tokens.stop, zero_stop
        job.layers, job.heads = len(layers), len(heads)
        return job, [known, job]

    def _side(
        self,
        side: Any,
        component: Component,
        bases: Sequence[Sequence[int]],
        pages: PageTable,
        *,
        used: range,
        heads: range,
    ) -> list[Any]:
        """Fill one side with the pages at positions `used`. Returns what it points to."""
        try:
            addresses = array("Q", [address for column in bases for address in column])
        except OverflowError as error:
            raise LocalError(
                ErrorCode.OUT_OF_RANGE, f"a base address of {component.name} is no address of 64 bits"
            ) from error
        ids = array("q", pages.ids[used.start : used.stop])
        columns = [self._ffi.from_buffer("uint64_t[]", addresses), self._ffi.from_buffer("int64_t[]", ids)]
        side.bases, side.pages = columns
        side.regions, side.page_count = len(bases), len(ids)
        side.null_page = _NO_NULL if pages.null is None else pages.null
        side.first_token, side.page_tokens = pages.first_token + used.start * pages.page_tokens, pages.page_tokens
        side.head_start = heads.start - component.head_start
        return columns

    def _keys(self, job: Any, component: Component, layers: Sequence[int], heads: range) -> Any:
        keys = self._ffi.from_buffer("uint64_t[]", head_keys(component.name, tuple(layers), heads))
        job.head_keys = keys
        return keys

    def _remembered(self, owners: tuple[object, ...], make: Any) -> _Parts:
        """What was made of these objects before. They are immutable, and while they are kept no other has their id."""
        key = tuple(map(id, owners))
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            known = self._known[key] = make()._replace(owners=owners)
        return known

    def _copied(self, source: Component, destination: Component) -> _Parts:
        parts = [self._copy(plane, destination.plane(plane.name)) for plane in source.planes]
        # in the order in which the receiver hashes its landed rows
        order = [source.plane(plane.name) for plane in destination.planes]
        return self._made(source, order, destination, parts, ())

    def _hashed(self, component: Component) -> _Parts:
        return self._made(component, component.planes, component, [], ())

    def _converted(self, conversion: Conversion) -> _Parts:
        source, destination = conversion.source, conversion.destination
        parts = [made for part in conversion.parts for made in self._part(part)]
        return self._made(source, source.planes, destination, parts, destination.planes)

    def _made(
        self,
        source: Component,
        row: Sequence[Plane],
        destination: Component,
        parts: Sequence[dict[str, Any]],
        zero: Sequence[Plane],
    ) -> _Parts:
        new = self._ffi.new
        offsets = dict(zip((plane.name for plane in row), _running(plane.row_bytes for plane in row), strict=True))

        def plane_of(component: Component, plane: Plane | None) -> dict[str, int]:
            return self._plane(component, plane, offsets if component is source else {})

        c_parts = [
            {
                **part,
                "source": plane_of(source, part["source"]),
                "source_scale": plane_of(source, part["source_scale"]),
                "destination": self._plane(destination, part["destination"], {}),
                "destination_scale": self._plane(destination, part["destination_scale"], {}),
            }
            for part in parts
        ]
        return _Parts(
            new("pdh_part[]", c_parts),
            len(c_parts),
            new("pdh_plane[]", [plane_of(source, plane) for plane in row]),
            len(row),
            new("pdh_plane[]", [self._plane(destination, plane, {}) for plane in zero]),
            len(zero),
            (),
        )

    def _plane(self, component: Component, plane: Plane | None, offsets: Mapping[str, int]) -> dict[str, int]:
        if plane is None:
            return {}
        return {
            "offset": plane.offset,
            "page_stride": plane.page_stride,
            "token_stride": plane.token_stride,
            "head_stride": plane.head_stride,
            "element_stride": plane.element_step,
            "elements": plane.elements,
            "element": getattr(self._c, _ELEMENTS[plane.element]),
            "region": component.regions.index(plane.region),
            "row_offset": offsets.get(plane.name, 0),
        }

    def _copy(self, source: Plane, destination: Plane) -> dict[str, Any]:
        return self._values(self._c.PDH_COPY, source, None, destination, None)

    def _values(
        self,
        kind: int,
        source: Plane,
        source_scale: Plane | None,
        destination: Plane,
        destination_scale: Plane | None,
    ) -> dict[str, Any]:
        return {
            "kind": kind,
            "source": source,
            "source_scale": source_scale,
            "destination": destination,
            "destination_scale": destination_scale,
        }

    def _part(self, part: ConversionPart) -> list[dict[str, Any]]:
        """What happens to one part: as `convert.convert_part`, which is the specification."""
        old, new = part.source_scale, part.destination_scale
        if part.kernel == COPY:
            scales = [self._copy(old, new)] if old is not None and new is not None else []
            return [self._copy(part.source, part.destination), *scales]
        _check_encodings(part)
        if old is not None and new is not None and _keeps_codes(part, old):
            scales = [self._values(self._c.PDH_SCALES, old, None, new, None)]
            return [self._copy(part.source, part.destination), *scales]
        made = self._values(self._c.PDH_CONVERT, part.source, old, part.destination, new)
        steps = [self._step(part, step) for step in part.steps]
        return [
            {
                **made,
                "source_group": 0 if old is None else _group(part.source),
                "destination_group": 0 if new is None else _group(part.destination),
                "steps": len(steps),
                "step": steps,
            }
        ]

    def _step(self, part: ConversionPart, step: str) -> dict[str, int]:
        if step == "hadamard128":
            if part.source.elements != _HADAMARD_ELEMENTS:
                raise LocalError(
                    ErrorCode.MISUSE,
                    f"the last axis has {part.source.elements} elements: the rotation needs {_HADAMARD_ELEMENTS}",
                )
            return {"kind": self._c.PDH_HADAMARD128, "rope": 0}
        for order, kind in ((RopeOrder.INTERLEAVED, "PDH_INTERLEAVED"), (RopeOrder.HALF_SPLIT, "PDH_HALF_SPLIT")):
            elements = step.removeprefix(order.value)
            if elements != step and elements.isdecimal() and int(elements) <= part.source.elements:
                return {"kind": getattr(self._c, kind), "rope": int(elements)}
        raise LocalError(
            ErrorCode.MISUSE, f"no conversion step is called {step!r}: planner and conversions differ in version"
        )


def _check_encodings(part: ConversionPart) -> None:
    """Refuse what has no meaning, or no kernel."""
    for plane, scale in ((part.source, part.source_scale), (part.destination, part.destination_scale)):
        if scale is not None and scale.element not in _SCALES:
            raise LocalError(
                ErrorCode.LAYOUT_MISMATCH, f"plane {scale.name}: {scale.element.value} is no type of scale"
            )
        if scale is not None and plane.elements % _group(plane):
            raise LocalError(
                ErrorCode.MISUSE, f"{plane.elements} elements cannot be divided into blocks of {_group(plane)}"
            )
    if part.destination_scale is None and part.destination.element not in _PLAIN:
        raise LocalError(
            ErrorCode.LAYOUT_MISMATCH,
            f"plane {part.destination.name}: nothing can be stored as {part.destination.element.value} without scales",
        )
    scaled = part.destination_scale is not None and part.destination.element is not Element.E4M3
    if part.source.element in {Element.UE8M0, Element.UE8M0X4} or scaled or len(part.steps) > _MOST_STEPS:
        raise Unsupported(
            ErrorCode.LAYOUT_MISMATCH, f"there is no compiled kernel {part.kernel} for plane {part.destination.name}"
        )


def _keeps_codes(part: ConversionPart, old: Plane) -> bool:
    """Only the scales' type differs, and the destination's can hold every scale of the source."""
    return (
        old.element in {Element.UE8M0, Element.UE8M0X4}
        and not part.steps
        and _group(part.source) == _group(part.destination)
    )


def _group(plane: Plane) -> int:
    return 0 if plane.quantisation is None else plane.quantisation.group


def _columns(component: Component, bases: Mapping[str, Sequence[int]]) -> list[Sequence[int]]:
    return [bases[region] for region in component.regions]


def _running(sizes: Iterable[int]) -> list[int]:
    """Sums of all sizes before each."""
    sums, total = [], 0
    for size in sizes:
        sums.append(total)
        total += size
    return sums

"""A picture of one run: what each handoff did when, and what of its transfer was exposed after prefill ended.

The upper panel shows the whole run. The lower one shows the same handoffs around the end of their prefill, each shifted
so that its last chunk ends at zero: there the exposed part is wide enough to be read. Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.observe.handoffs import HandoffTimes, group_by_handoff, handoff_times
from pdhandoff.observe.steps import Step
from pdhandoff.observe.trace import Event, Recording

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MAX_HANDOFFS", "draw_timeline"]

MAX_HANDOFFS: Final = 16
"more than these do not fit a picture: the first ones are drawn"

_INK: Final = "#24292f"
_MUTED: Final = "#6e7781"
_RULE: Final = "#d8dee4"
_EXPOSED: Final = "#cf222e"


class _Style(NamedTuple):
    row: int
    "0 prefill side, 1 on the way, 2 decode side"
    colour: str
    label: str
    edge: str
    "colour of the line around a bar: white parts neighbours, but would paint over a bar that is one pixel wide"
    hatch: str = ""


class _Mark(NamedTuple):
    row: int
    marker: str
    size: float
    colour: str
    edge: str
    label: str


_STYLES: Final = {
    Step.PREFILL: _Style(0, "#3b6fb6", "prefill chunk", "white"),
    Step.GATHER: _Style(1, "#1b9e9e", "gather into the staging ring", "#1b9e9e"),
    Step.WRITE: _Style(1, "#e8963a", "one-sided write", "#e8963a"),
    Step.WAIT: _Style(2, "#ffffff", "decode engine busy", _MUTED, "////"),
    Step.CONVERT: _Style(2, "#8f5bb5", "convert", "#8f5bb5"),
    Step.DECODE: _Style(2, "#4aa564", "decode step", "white"),
}
_MARKS: Final = {
    Step.LANDED: _Mark(1, "|", 7, _INK, _INK, "chunk has landed"),
    Step.READY: _Mark(2, "D", 5, _EXPOSED, "white", "READY: complete and verified"),
}
_ROWS: Final = 3
_PITCH: Final = _ROWS + 1.0
"height of one handoff's rows and the gap below them"


class _Handoff(NamedTuple):
    times: HandoffTimes
    events: list[Event]
    top: float
    "its place on the vertical axis: the upper edge of its first row"


def draw_timeline(recordings: Iterable[Recording], path: Path, *, title: str = "Handoffs") -> None:
    """Draw recordings of one host into a PNG file.

    Args:
        recordings: of the prefill and of the decode process; spans and instants named as in `Step`.
        path: the file; its folder must exist.
        title: the headline.

    Raises:
        LocalError: no event belongs to a handoff, or matplotlib is not installed.
    """
    groups = group_by_handoff(recordings)
    if not groups:
        raise LocalError(ErrorCode.MISUSE, "no event names a handoff: pass `handoff=label` when recording")
    shown = list(groups.items())[:MAX_HANDOFFS]
    handoffs = [
        _Handoff(handoff_times(label, events), events, -index * _PITCH) for index, (label, events) in enumerate(shown)
    ]
    figure, run, zoom = _make_figure(len(handoffs))
    _draw_run(run, handoffs)
    _draw_zoom(zoom, handoffs)
    if len(groups) > len(handoffs):
        title = f"{title} (the first {len(handoffs)} of {len(groups)})"
    figure.text(0.012, 1.0, title, fontsize=15, fontweight="bold", color=_INK, va="top")
    _draw_legend(figure)
    figure.savefig(path, dpi=150, facecolor="white", bbox_inches="tight", pad_inches=0.2, metadata={"Software": None})


def _make_figure(count: int) -> tuple[Figure, Axes, Axes]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LocalError(ErrorCode.CONFIG, "a timeline picture needs matplotlib: install pdhandoff[demo]") from error
    panel = 0.55 + 0.62 * count
    height = 2 * panel + 1.9
    figure = Figure(figsize=(12.5, height))
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        2, 1, left=0.1, right=0.9, top=1 - 0.85 / height, bottom=0.5 / height, hspace=0.85 / panel
    )
    run, zoom = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    for axes, heading in ((run, "The whole run"), (zoom, "Around the end of each prefill")):
        axes.set_title(heading, loc="left", fontsize=11, color=_INK, pad=8)
        axes.set_ylim(-count * _PITCH + 0.7, 0.5)
        axes.tick_params(axis="x", colors=_MUTED, labelsize=9)
        axes.tick_params(axis="y", length=0, labelsize=10, labelcolor=_INK)
        axes.grid(axis="x", color=_RULE, linewidth=0.7)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(_RULE)
    return figure, run, zoom


def _draw_run(axes: Axes, handoffs: Sequence[_Handoff]) -> None:
    origin = min(handoff.times.start_ns for handoff in handoffs)
    length = max(1, max(handoff.times.end_ns for handoff in handoffs) - origin)
    unit, name = _unit(length)
    axes.set_xlim(0, length / unit)
    axes.set_xlabel(name, color=_MUTED, fontsize=9)
    for handoff in handoffs:
        _draw_exposed(axes, handoff, origin, unit)
        _draw_events(axes, handoff, origin, unit, edge=0.0)
    _name_handoffs(axes, handoffs)


def _draw_zoom(axes: Axes, handoffs: Sequence[_Handoff]) -> None:
    spans = (_exposed_span(handoff.times) for handoff in handoffs)
    widest = max((end - start for start, end in filter(None, spans)), default=0)
    # a long wait for a busy engine is cut off, so that the exposed parts stay readable
    widest = max(1000, min(widest, 4 * max(handoff.times.exposed_ns or 0 for handoff in handoffs)))
    unit, name = _unit(widest)
    axes.set_xlim(-0.7 * widest / unit, 1.4 * widest / unit)
    axes.set_xlabel(f"{name} after the last prefill chunk ended", color=_MUTED, fontsize=9)
    axes.axvline(0, color=_INK, linewidth=1, zorder=5)
    for handoff in handoffs:
        if handoff.times.prefill_end_ns is not None:
            _draw_exposed(axes, handoff, handoff.times.prefill_end_ns, unit)
            _draw_events(axes, handoff, handoff.times.prefill_end_ns, unit, edge=0.8)
            _note_exposed(axes, handoff)
    axes.text(1.008, 1.0, "exposed", transform=axes.transAxes, fontsize=9, color=_MUTED, va="bottom")
    _name_handoffs(axes, handoffs)


def _draw_events(axes: Axes, handoff: _Handoff, origin: int, unit: float, *, edge: float) -> None:
    """The spans of one handoff as bars, its instants as marks. `edge` is the width of the line around bars."""
    for step, style in _STYLES.items():
        bars = [
            ((event.start_ns - origin) / unit, (event.duration_ns or 0) / unit)
            for event in handoff.events
            if event.name == step
        ]
        if not bars:
            continue
        low = handoff.top - style.row - 0.9
        height = 0.8
        if style.row == 1:  # gather above, write below
            height = 0.4
            low += 0.4 if step is Step.GATHER else 0.0
        axes.broken_barh(
            bars,
            (low, height),
            facecolor=style.colour,
            edgecolor=style.edge,
            linewidth=max(0.6, edge) if style.hatch else edge or 0.3,
            hatch=style.hatch or None,
            zorder=3,
        )
    for step, mark in _MARKS.items():
        times = [(event.start_ns - origin) / unit for event in handoff.events if event.name == step]
        height = handoff.top - mark.row - 0.5
        axes.plot(
            times, [height] * len(times), mark.marker, color=mark.colour, markersize=mark.size,
            markeredgecolor=mark.edge, markeredgewidth=1, zorder=6,
        )  # fmt: skip


def _exposed_span(times: HandoffTimes) -> tuple[int, int] | None:
    """From the end of prefill until decode may start, waits for the engine included."""
    if times.prefill_end_ns is None or times.runnable_ns is None:
        return None
    return times.prefill_end_ns, max(times.prefill_end_ns, times.runnable_ns)


def _draw_exposed(axes: Axes, handoff: _Handoff, origin: int, unit: float) -> None:
    span = _exposed_span(handoff.times)
    if span is None:
        return
    start, end = ((moment - origin) / unit for moment in span)
    low, high = handoff.top - _ROWS - 0.05, handoff.top + 0.05
    axes.fill_between([start, end], low, high, color=_EXPOSED, alpha=0.13, linewidth=0, zorder=1)
    axes.vlines([start, end], low, high, color=_EXPOSED, linewidth=0.8, alpha=0.7, zorder=2)


def _note_exposed(axes: Axes, handoff: _Handoff) -> None:
    """At the right edge: how long the exposed part took."""
    exposed = handoff.times.exposed_ns
    if exposed is None:
        text, colour = "did not become ready", _MUTED
    else:
        unit, name = _unit(exposed)
        text, colour = f"{exposed / unit:.3g} {name}", _EXPOSED
    middle = handoff.top - _ROWS / 2
    axes.annotate(
        text, (1, middle), xycoords=("axes fraction", "data"), xytext=(8, 0), textcoords="offset points", fontsize=10,
        color=colour, va="center", annotation_clip=False,
    )  # fmt: skip


def _name_handoffs(axes: Axes, handoffs: Sequence[_Handoff]) -> None:
    axes.set_yticks([handoff.top - _ROWS / 2 for handoff in handoffs], [handoff.times.label for handoff in handoffs])
    for handoff in handoffs[1:]:
        axes.axhline(handoff.top + (_PITCH - _ROWS) / 2, color=_RULE, linewidth=0.7, zorder=0)


def _draw_legend(figure: Figure) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = [
        Patch(
            facecolor=style.colour,
            edgecolor=style.edge,
            hatch=style.hatch or None,
            label=style.label,
        )
        for style in _STYLES.values()
    ]
    handles.extend(
        Line2D([], [], color=mark.colour, marker=mark.marker, markersize=mark.size, linestyle="", label=mark.label)
        for mark in _MARKS.values()
    )
    handles.append(Patch(facecolor=_EXPOSED, alpha=0.2, label="exposed: prefill is over, decode may not start yet"))
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.005, 0.0), ncols=5, frameon=False, fontsize=9.5,
        labelcolor=_INK, handlelength=1.6, columnspacing=1.8,
    )  # fmt: skip


def _unit(length_ns: int) -> tuple[float, str]:
    """The unit in which a length is a number between 1 and 1000 or so: nanoseconds per unit, and its name."""
    if length_ns >= 2e9:
        return 1e9, "s"
    return (1e6, "ms") if length_ns >= 1e6 else (1e3, "µs")

"""Draws a state machine as a ladder: one column per state, one arrow per pair of states, as SVG text.

Every arrow has a row of its own, so that nothing overlaps whatever the machine looks like. Colours are CSS variables of
the docs' theme, with fallbacks, so that the picture follows its light and dark modes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape
from typing import Final, NamedTuple

__all__ = ["Arrow", "draw_ladder"]

_COLUMN: Final = 150
_BOX_WIDTH: Final = 126
_BOX_HEIGHT: Final = 34
_MARGIN: Final = 20
_LINE: Final = 16
"height of a line of text"
_GAP: Final = 14
"between an arrow and the text of the next one"
_CHARACTER: Final = 7.2
"width of a character of a label, on the safe side"


class Arrow(NamedTuple):
    """All transitions from one state to another."""

    source: int
    "column"
    target: int
    "column; the same for a transition that stays"
    labels: tuple[str, ...]
    "what causes them"


def draw_ladder(states: Sequence[str], arrows: Sequence[Arrow], *, initial: int, terminal: Sequence[int]) -> str:
    """The picture, as one `<svg>` element.

    Args:
        states: names, from left to right.
        arrows: from top to bottom.
        initial: column of the state that the machine starts in.
        terminal: columns of the states that it never leaves.
    """
    width = 2 * _MARGIN + _COLUMN * len(states)
    top = _MARGIN + _BOX_HEIGHT
    y = top + _GAP
    body: list[str] = []
    for arrow in arrows:
        lines = _wrap(arrow, len(states))
        y += _LINE * len(lines) + _GAP
        body.append(_draw_arrow(arrow, lines, y, len(states)))
    height = y + _GAP + _MARGIN
    columns = [
        _draw_column(name, index, height - _MARGIN, start=index == initial, end=index in terminal)
        for index, name in enumerate(states)
    ]
    return (
        f'<svg class="ladder" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="var(--font-stack, sans-serif)" font-size="13">'
        f"{_DEFINITIONS}{''.join(columns)}{''.join(body)}</svg>"
    )


_INK: Final = "var(--color-foreground-primary, #1f2328)"
_RULE: Final = "var(--color-foreground-border, #8c959f)"
_FILL: Final = "var(--color-background-secondary, #f6f8fa)"
_PAPER: Final = "var(--color-background-primary, #ffffff)"
_ACCENT: Final = "var(--color-brand-primary, #0969da)"

_DEFINITIONS: Final = (
    '<defs><marker id="ladder-head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
    f'orient="auto"><path d="M0 0 10 5 0 10z" fill="{_ACCENT}"/></marker></defs>'
)


def _centre(column: int) -> int:
    return _MARGIN + _COLUMN * column + _COLUMN // 2


def _draw_column(name: str, column: int, bottom: int, *, start: bool, end: bool) -> str:
    x, left = _centre(column), _centre(column) - _BOX_WIDTH // 2
    line = (
        f'<line x1="{x}" y1="{_MARGIN + _BOX_HEIGHT}" x2="{x}" y2="{bottom}" stroke="{_RULE}" stroke-dasharray="2 4"/>'
    )
    colour, stroke = (_ACCENT, 2) if start else (_RULE, 1)
    box = _box(left, _MARGIN, _BOX_WIDTH, _BOX_HEIGHT, f'fill="{_FILL}" stroke="{colour}" stroke-width="{stroke}"')
    inner = _box(left + 3, _MARGIN + 3, _BOX_WIDTH - 6, _BOX_HEIGHT - 6, f'fill="none" stroke="{_RULE}"') if end else ""
    size = min(13, int(13 * (_BOX_WIDTH - 12) / (8.5 * len(name))))
    text = (
        f'<text x="{x}" y="{_MARGIN + _BOX_HEIGHT / 2 + 4.5}" text-anchor="middle" font-weight="600" '
        f'font-size="{size}" fill="{_INK}">{escape(name)}</text>'
    )
    return line + box + inner + text


def _box(x: int, y: int, width: int, height: int, style: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" {style}/>'


def _wrap(arrow: Arrow, columns: int) -> list[str]:
    """The labels of an arrow in lines that fit above it, or beside it when it stays in its column."""
    if arrow.source == arrow.target:
        room = max(_COLUMN, _COLUMN * (columns - arrow.source) - _COLUMN // 2 - 40)
    else:
        middle = (_centre(arrow.source) + _centre(arrow.target)) / 2
        reach = min(middle, 2 * _MARGIN + _COLUMN * columns - middle)
        room = int(2 * min(reach - _MARGIN, 1.2 * _COLUMN + abs(arrow.source - arrow.target) * _COLUMN / 2))
    return textwrap.wrap(", ".join(arrow.labels), max(12, int(room / _CHARACTER)), break_long_words=False)


def _draw_arrow(arrow: Arrow, lines: Sequence[str], y: int, columns: int) -> str:
    """One arrow with its last line of text just above `y`. The text has an edge of paper, to be read across columns."""
    source, target = _centre(arrow.source), _centre(arrow.target)
    style = f'fill="none" stroke="{_ACCENT}" stroke-width="1.6" marker-end="url(#ladder-head)"'
    if arrow.source == arrow.target:
        middle = y - _LINE * len(lines) / 2
        side = -1 if arrow.source == columns - 1 and columns > 1 else 1
        path = f"M{source} {middle - 7}h{18 * side}a7 7 0 0 {int(side > 0)} 0 14h{-16 * side}"
        x, anchor, last = source + 34 * side, "start" if side > 0 else "end", y - 4
    else:
        path = f"M{source} {y}H{target - 2 if target > source else target + 2}"
        x, anchor, last = (source + target) // 2, "middle", y - 6
    text = "".join(
        f'<text x="{x}" y="{last - _LINE * (len(lines) - 1 - index)}" text-anchor="{anchor}" fill="{_INK}" '
        f'stroke="{_PAPER}" stroke-width="4" paint-order="stroke">{escape(line)}</text>'
        for index, line in enumerate(lines)
    )
    return f'<path d="{path}" {style}/>{text}'

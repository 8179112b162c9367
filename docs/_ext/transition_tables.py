"""Sphinx extension: draws the state machines that the code runs, from their tables of transitions.

The directive `{state-diagram} package.module.TABLE` gives a picture, in the page itself, and a list of all transitions.
A table has `initial` and `terminal` (enum members) and iterates over rows of (state, input, next, action name).
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Collection, Iterator
from typing import Any, ClassVar, Protocol

from docutils import nodes
from ladder import Arrow, draw_ladder
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

__all__ = ["StateDiagram", "TransitionTable", "order_states", "picture_of", "setup"]


class TransitionTable(Protocol):
    """What the directive needs of a table."""

    @property
    def initial(self) -> Any:
        """The state that a machine starts in."""

    @property
    def terminal(self) -> Collection[Any]:
        """The states that it never leaves."""

    def __iter__(self) -> Iterator[Any]:
        """All rows: (state, input, next, action) by name."""


def order_states(table: TransitionTable) -> list[enum.Enum]:
    """From left to right: the initial state, the others as they are reached from it, states without a way out last."""
    found: list[enum.Enum] = [table.initial]
    for state in found:
        found.extend({row.next: None for row in table if row.state is state and row.next not in found})
    found.extend({row.state: None for row in table if row.state not in found})
    return sorted(found, key=lambda state: state in table.terminal)


def picture_of(table: TransitionTable) -> str:
    """The machine as one `<svg>` element: the inputs between two states share an arrow."""
    states = order_states(table)
    arrows: dict[tuple[int, int], list[str]] = {}
    for row in table:
        arrows.setdefault((states.index(row.state), states.index(row.next)), []).append(_words(row.input))
    return draw_ladder(
        [_words(state) for state in states],
        [Arrow(source, target, tuple(labels)) for (source, target), labels in sorted(arrows.items())],
        initial=0,
        terminal=[index for index, state in enumerate(states) if state in table.terminal],
    )


class StateDiagram(SphinxDirective):
    """`{state-diagram} package.module.TABLE`."""

    required_arguments: ClassVar[int] = 1

    def run(self) -> list[nodes.Node]:
        """The picture and the list of transitions."""
        module_name, _, attribute = self.arguments[0].rpartition(".")
        try:
            module = importlib.import_module(module_name)
            table: TransitionTable = getattr(module, attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise self.error(f"state-diagram: {self.arguments[0]} is no table: {error}") from error
        if module.__file__:
            self.env.note_dependency(module.__file__)
        picture = f'<div style="overflow-x: auto; margin: 1rem 0">{picture_of(table)}</div>'
        return [nodes.raw("", picture, format="html"), _list_of_transitions(table)]


def _list_of_transitions(table: TransitionTable) -> nodes.table:
    head = ("state", "input", "next state", "action")
    order = order_states(table)
    rows = sorted(table, key=lambda row: order.index(row.state))
    body = [(_words(row.state), _words(row.input), _words(row.next), row.action) for row in rows]
    group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in head), cols=len(head))
    group += nodes.thead("", _table_row(head))
    group += nodes.tbody("", *(_table_row(cells) for cells in body))
    return nodes.table("", group)


def _table_row(cells: Collection[str]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", cell)) for cell in cells))


def _words(member: enum.Enum) -> str:
    return member.name.lower().replace("_", " ")


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("state-diagram", StateDiagram)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

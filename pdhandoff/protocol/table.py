"""State machines as data: one table of transitions, which the code runs, the docs draw and the tests walk."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar, final

__all__ = ["Machine", "Name", "Row", "Table"]

S = TypeVar("S", bound="Name")
I = TypeVar("I", bound="Name")  # noqa: E741 - the letter of "input"


class Name(enum.Enum):
    """Base of the enumerations that tables are made of: hashed by identity, since a handoff looks up dozens of them."""

    __hash__ = object.__hash__


class Row(NamedTuple, Generic[S, I]):
    """One transition: in `state`, on `input`, do `action` and go to `next`."""

    state: S
    input: I
    next: S
    action: str
    "the name of what the owner of the machine does, or an empty string"


@final
class Table(Generic[S, I]):
    """All transitions of one machine. A (state, input) pair that is not in it is ignored and counted (rule 5)."""

    def __init__(self, name: str, *, initial: S, terminal: Sequence[S], rows: Sequence[tuple[S, I, S, str]]) -> None:
        self.name = name
        self.initial = initial
        self.terminal = frozenset(terminal)
        self._rows = tuple(Row(*row) for row in rows)
        lookup = {(row.state, row.input): row for row in self._rows}
        if len(lookup) != len(self._rows):
            raise ValueError(f"table {name} has two rows for one (state, input)")
        if any(row.state in self.terminal for row in self._rows):
            raise ValueError(f"table {name} leaves a terminal state")
        self.lookup: Mapping[tuple[S, I], Row[S, I]] = MappingProxyType(lookup)

    def __iter__(self) -> Iterator[Row[S, I]]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class Machine(Generic[S, I]):
    """One instance of a table. Only `feed` changes the state."""

    __slots__ = ("_table", "state")

    def __init__(self, table: Table[S, I]) -> None:
        self._table = table
        self.state: S = table.initial

    @property
    def ended(self) -> bool:
        """Whether no input can change the state any more."""
        return self.state in self._table.terminal

    def allows(self, input_: I) -> bool:
        """Whether the table has a row for this input in the current state."""
        return (self.state, input_) in self._table.lookup

    def feed(self, input_: I) -> str | None:
        """Take one input. Returns the action to do, or None when the input is ignored in this state."""
        row = self._table.lookup.get((self.state, input_))
        if row is None:
            return None
        self.state = row.next
        return row.action

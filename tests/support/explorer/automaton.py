"""A core as an automaton: its states are interned, its steps computed once by the real code and remembered.

A core is a pure function of its inputs, so two cores with equal snapshots behave alike, and a step from a known state
need not be computed again.
"""

from __future__ import annotations

import copy
import enum
from collections import deque
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, Generic, TypeVar

import msgspec

from pdhandoff.protocol import consumer_table, producer_table
from pdhandoff.protocol.deadlines import Deadlines

C = TypeVar("C")

_SHARED = (consumer_table.TABLE, producer_table.TABLE)
_COUNTS = frozenset({"failed", "ignored", "_failed", "_ignored", "_ready", "_quarantines", "_limits", "limits"})
"attributes that no decision of a core depends on, or that never change"
_PLAIN = (int, float, str, bytes, type(None), enum.Enum, msgspec.Struct, FunctionType)


def freeze(value: Any, seen: dict[int, int] | None = None) -> Any:  # noqa: PLR0911 - one for each kind of value
    """A hashable picture of a core's state: equal pictures, equal behaviour. Counts are left out."""
    seen = {} if seen is None else seen
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Deadlines):
        return tuple(sorted(value._at.items(), key=repr))
    if isinstance(value, tuple):
        return tuple(freeze(each, seen) for each in value)
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, Mapping):
        return tuple((freeze(key, seen), freeze(each, seen)) for key, each in value.items())
    if isinstance(value, list | deque):
        return tuple(freeze(each, seen) for each in value)
    if isinstance(value, set | frozenset):
        return tuple(sorted(value))
    if value in _SHARED:
        return value.name
    slots = getattr(type(value), "__slots__", None)
    names = vars(value) if slots is None else slots
    return tuple(freeze(getattr(value, name), seen) for name in sorted(names) if name not in _COUNTS)


class Automaton(Generic[C]):
    """Interned states of one kind of core."""

    def __init__(self) -> None:
        self.cores: list[C] = []
        self._ids: dict[Any, int] = {}
        self._steps: dict[Any, tuple[int, tuple[Any, ...], Any]] = {}
        self._views: dict[Any, Any] = {}

    def intern(self, core: C) -> int:
        """The number of this core's state. The core must not be changed afterwards."""
        picture = freeze(core)
        number = self._ids.setdefault(picture, len(self.cores))
        if number == len(self.cores):
            self.cores.append(core)
        return number

    def step(self, state: int, method: str, *arguments: Any, **named: Any) -> tuple[int, tuple[Any, ...], Any]:
        """Call a method in a state. Returns the next state, the effects, and what the method returned."""
        key = (state, method, arguments, *named.items())
        known = self._steps.get(key)
        if known is None:
            core: Any = copy.deepcopy(self.cores[state], {id(table): table for table in _SHARED})
            answer = getattr(core, method)(*arguments, **named)
            effects = tuple(core.take_effects())
            known = self._steps[key] = (self.intern(core), effects, answer)
        return known

    def view(self, state: int, look: Callable[[C], Any]) -> Any:
        """What `look` sees in a state, remembered."""
        key = (state, look)
        if key not in self._views:
            self._views[key] = look(self.cores[state])
        return self._views[key]

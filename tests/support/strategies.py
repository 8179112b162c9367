"""Hypothesis strategies for every message of the protocol, derived from the types that the decoder checks."""

from __future__ import annotations

from typing import Any, Final, get_args

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from pdhandoff.protocol.messages import Message

__all__ = ["MESSAGE_TYPES", "any_message", "of_type"]

MESSAGE_TYPES: Final[tuple[type[msgspec.Struct], ...]] = get_args(Message)
_LONGEST: Final = 40
"characters or bytes; long ones are no different"


def any_message() -> st.SearchStrategy[Any]:
    """A message of any type."""
    return st.one_of([of_type(kind) for kind in MESSAGE_TYPES])


def of_type(kind: Any) -> st.SearchStrategy[Any]:
    """Values that the decoder takes for `kind`."""
    return _strategy(inspect.type_info(kind))


def _strategy(info: inspect.Type) -> st.SearchStrategy[Any]:  # noqa: PLR0911 - one for each kind of type
    match info:
        case inspect.IntType():
            low = -(1 << 63) if info.ge is None else info.ge
            high = (1 << 63) - 1 if info.le is None else info.le
            return st.integers(low, high if info.lt is None else info.lt - 1)
        case inspect.StrType():
            return st.text(min_size=info.min_length or 0, max_size=min(info.max_length or _LONGEST, _LONGEST))
        case inspect.BytesType():
            return st.binary(min_size=info.min_length or 0, max_size=min(info.max_length or _LONGEST, _LONGEST))
        case inspect.BoolType():
            return st.booleans()
        case inspect.VarTupleType():
            return st.lists(_strategy(info.item_type), max_size=3).map(tuple)
        case inspect.TupleType():
            return st.tuples(*map(_strategy, info.item_types))
        case inspect.StructType() | inspect.NamedTupleType():
            return st.builds(info.cls, **{field.name: _strategy(field.type) for field in info.fields})
    raise TypeError(info)

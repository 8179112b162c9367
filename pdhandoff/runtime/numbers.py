"""Whole numbers from engines, which may be NumPy's or a tensor library's: made plain where they come in."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["whole_number"]


def whole_number(name: str, value: SupportsIndex) -> int:
    """A plain integer. Raises LocalError(MISUSE) for anything that is no whole number, a float too."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise LocalError(ErrorCode.MISUSE, f"{name} must be a whole number, not {value!r}") from error

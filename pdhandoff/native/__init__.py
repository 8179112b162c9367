"""Copies, conversions and digests: the torch reference, which is the specification, and later compiled kernels."""

from __future__ import annotations

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.native.base import Native

__all__ = ["Native", "load"]


def load(preference: str | None = None) -> Native:
    """The implementation of that name, or the best one that works here.

    Args:
        preference: "reference"; None: the best.

    Raises:
        LocalError: there is none of that name, or what it needs is not installed.

    """
    if preference not in {None, "reference"}:
        raise LocalError(
            ErrorCode.CONFIG, f"there are no conversions named {preference!r}: use 'reference', or leave the choice out"
        )
    try:
        from pdhandoff.native.reference import Reference
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise LocalError(
            ErrorCode.CONFIG,
            "the reference conversions need torch, which is not installed: install pdhandoff[demo], or hand over "
            "between equal layouts with the payload digest switched off",
        ) from error
    return Reference()

"""Copies, conversions and digests: compiled for CUDA devices and for CPUs, and in torch, which is the specification."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Final

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.native.base import Gathered, GatherPart, Native

__all__ = ["PREFERENCE_VARIABLE", "GatherPart", "Gathered", "Native", "load"]

PREFERENCE_VARIABLE: Final = "PDHANDOFF_NATIVE"
"environment variable that names the implementation where a caller does not"

_LOG: Final = logging.getLogger("pdhandoff.native")
_REFERENCE: Final = "reference"


def load(preference: str | None = None) -> Native:
    """The implementation of that name, or the best one for memory of this process.

    `cuda` works on addresses that CUDA devices reach and on no others, `cpu` and `reference` on memory of this process
    and on no other: where memory is a GPU's, ask for `cuda` by name. Without a preference it is `cpu`, or `reference`
    where that was not built. One line in the log says which, and why not the better one.

    Args:
        preference: "cuda", "cpu" or "reference"; None: what the environment variable PDHANDOFF_NATIVE says when this is
            called, or else the best.

    Raises:
        LocalError: there is none of that name, or what it needs is not installed.

    """
    wanted = preference or os.environ.get(PREFERENCE_VARIABLE) or None
    if wanted is not None:
        if wanted not in _MAKERS:
            raise LocalError(
                ErrorCode.CONFIG,
                f"there are no conversions named {wanted!r}: use one of {', '.join(_MAKERS)}, or leave the choice out",
            )
        native = _MAKERS[wanted]()
        _LOG.info("conversions: %s, as asked for", native.name)
        return native
    reason = ""
    try:
        native = _compiled("cpu")
    except LocalError as error:
        reason = error.reason
        native = _reference()
    _LOG.info("conversions: %s%s", native.name, f" ({reason})" if reason else "")
    return native


def _compiled(name: str) -> Native:
    from pdhandoff.native.compiled import Compiled
    from pdhandoff.native.library import open_library

    return Compiled(open_library(name))


def _reference() -> Native:
    try:
        from pdhandoff.native.reference import Reference
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise LocalError(
            ErrorCode.CONFIG,
            "the reference conversions need torch, which is not installed: install pdhandoff[demo], install pdhandoff "
            "from its sources where a C++ compiler is on the PATH, or hand over between equal layouts with the payload "
            "digest switched off",
        ) from error
    return Reference()


_MAKERS: Final[Mapping[str, Callable[[], Native]]] = {
    "cuda": lambda: _compiled("cuda"),
    "cpu": lambda: _compiled("cpu"),
    _REFERENCE: _reference,
}

"""Movers by name: those that installed packages declare, and those that come with pdhandoff.

A package declares a mover in the entry-point group `pdhandoff.movers`: a name, and a callable that takes keyword
options and returns a `Mover`. Nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import Final

from pdhandoff.engines.base import Mover
from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["GROUP", "create", "known"]

GROUP: Final = "pdhandoff.movers"
"the entry-point group"

_SPELLED_OUT: Final = re.compile(r"[\w.]+:[\w.]+")
"module:factory, for a mover that is not declared"

_BUILT_IN: Final = {
    "loopback": "pdhandoff.engines.loopback:create",
    "mooncake": "pdhandoff.engines.mooncake:create",
    "nixl": "pdhandoff.engines.nixl:create",
}
"also declared as entry points; listed here so that a source tree that is not installed has them"


def _declared() -> dict[str, importlib.metadata.EntryPoint]:
    built_in = {name: importlib.metadata.EntryPoint(name, value, GROUP) for name, value in _BUILT_IN.items()}
    installed = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    return installed | built_in


def known() -> tuple[str, ...]:
    """Names that `create` takes, sorted. Being listed does not mean that a mover's own needs are installed."""
    return tuple(sorted(_declared()))


def create(name: str, **options: object) -> Mover:
    """A new mover.

    Arguments:
        name: as declared, for example `loopback`; or `module:factory` for one that is not.
        options: keyword arguments of that mover's own factory.

    Raises:
        LocalError: CONFIG, when it is not declared, cannot be imported, is no mover, or refuses an option.
        MoverError: as the mover's factory does.
    """
    declared = _declared()
    if _SPELLED_OUT.fullmatch(name):
        declared[name] = importlib.metadata.EntryPoint(name, name, GROUP)
    if name not in declared:
        raise LocalError(
            ErrorCode.CONFIG,
            f"there is no mover {name!r}: known are {', '.join(sorted(declared))}; a package adds one by an entry "
            f"point in the group {GROUP!r}",
        )
    entry = declared[name]
    try:
        factory = entry.load()
    except (ImportError, AttributeError, OSError) as error:
        raise LocalError(
            ErrorCode.CONFIG,
            f"mover {name!r} ({entry.value}) cannot be imported: {type(error).__name__}: {error}. Install what it "
            "needs, or choose another mover",
        ) from error
    try:
        mover = factory(**options)
    except TypeError as error:
        raise LocalError(ErrorCode.CONFIG, f"mover {name!r} ({entry.value}) cannot be made: {error}") from error
    if not isinstance(mover, Mover):
        raise LocalError(
            ErrorCode.CONFIG,
            f"{entry.value} returned a {type(mover).__name__}, which is no mover: it lacks some of its verbs",
        )
    return mover

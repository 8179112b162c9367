"""Engines by name, or as module:factory."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from pdhandoff.errors import ErrorCode, LocalError, PdHandoffError
from pdhandoff_tilert.engine import DecodeEngine

__all__ = ["NAMED", "find_engine"]

_LOG: Final = logging.getLogger("pdhandoff.node")

NAMED: Final[Mapping[str, str]] = {
    "demo": "pdhandoff.demo.engine:create",
    "tilert": "pdhandoff_tilert.tilert_engine:create",
}
"name -> factory"

_SPELLED_OUT: Final = re.compile(r"[\w.]+:[\w.]+")
_CALLS: Final = ("unsupported", "park", "inject", "drop", "begin", "step", "end", "close")
_VALUES: Final = ("layout", "model", "max_seq_len", "end_token_ids")


def find_engine(name: str, options: Mapping[str, object]) -> Callable[[], DecodeEngine]:
    """What makes an engine. It checks what it has made.

    Args:
        name: one of NAMED, or module:factory.
        options: keyword arguments of the factory.

    Raises:
        LocalError: there is no such engine, or its factory does not take these options.
    """
    spelled = NAMED.get(name, name)
    if not _SPELLED_OUT.fullmatch(spelled):
        raise LocalError(ErrorCode.CONFIG, f"there is no engine {name!r}: name {', '.join(NAMED)}, or module:factory")
    module, _, attribute = spelled.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, OSError) as error:
        raise LocalError(
            ErrorCode.CONFIG,
            f"engine {name!r} ({spelled}) cannot be imported: {type(error).__name__}: {error}. Install what it needs, "
            "or choose another engine",
        ) from error
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise LocalError(ErrorCode.CONFIG, f"engine {name!r} ({spelled}) cannot be made: {error}") from error

    def make() -> DecodeEngine:
        try:
            engine = factory(**options)
        except PdHandoffError:
            raise
        except Exception as error:
            _LOG.exception("engine %s cannot be made", name)
            raise LocalError(
                ErrorCode.CONFIG, f"engine {name!r} ({spelled}) cannot be made: {type(error).__name__}: {error}"
            ) from error
        return _checked(engine, spelled)

    return make


def _checked(engine: Any, spelled: str) -> DecodeEngine:
    missing = [call for call in _CALLS if not callable(getattr(engine, call, None))]
    missing += [value for value in _VALUES if not hasattr(engine, value)]
    if missing:
        raise LocalError(
            ErrorCode.CONFIG,
            f"{spelled} returned a {type(engine).__name__}, which is no decode engine: it lacks {', '.join(missing)}",
        )
    return cast("DecodeEngine", engine)

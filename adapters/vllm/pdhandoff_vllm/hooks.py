"""No exception leaves a hook: vLLM has no handler around any of them, so one would end the server for everybody."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

__all__ = ["LOG", "Faulty", "guarded"]

LOG: Final = logging.getLogger("vllm.pdhandoff")
"below vLLM's own logger, whose handlers it shares"

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Faulty(Protocol):
    """A side of the connector."""

    def fault(self, hook: str, error: Exception) -> None:
        """A hook has raised: end what cannot be trusted any more."""


_F = TypeVar("_F", bound=Faulty)
_Hook = Callable[Concatenate[_F, _P], _R]


def guarded(otherwise: Callable[[], Any]) -> Callable[[_Hook[_F, _P, _R]], _Hook[_F, _P, _R]]:
    """Make a hook safe: what it raises is logged and told to its side's `fault`, and vLLM gets `otherwise()`.

    Args:
        otherwise: makes what the hook returns after an exception.
    """

    def wrap(hook: _Hook[_F, _P, _R]) -> _Hook[_F, _P, _R]:
        faults = itertools.count(1)

        @functools.wraps(hook)
        def safe(side: _F, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return hook(side, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the boundary to vLLM
                _report(side, hook.__name__, error, next(faults))
                result: _R = otherwise()
                return result

        return safe

    return wrap


def _report(side: Faulty, hook: str, error: Exception, count: int) -> None:
    """Tell the side, and the log: the first time, the second, the fourth, the eighth... some hooks run a lot."""
    if not count & (count - 1):
        LOG.error("fault %d in %s: handoffs under way are given up, requests go on", count, hook, exc_info=error)
    try:
        side.fault(hook, error)
    except Exception:  # as above
        LOG.exception("fault while giving up handoffs after a fault in %s", hook)

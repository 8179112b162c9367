"""Making the mover that is to be checked, by a name that any process understands."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from pdhandoff.engines.base import Mover
from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["make_mover", "spell"]


def make_mover(name: str, options: Mapping[str, object]) -> Mover:
    """A mover by its registered name, or by `module:factory`.

    Raises:
        LocalError: CONFIG, when there is none, or it refuses an option.
        MoverError: as the factory does.
    """
    if ":" not in name:
        from pdhandoff.engines import registry  # looks through all installed packages: that takes a while

        return registry.create(name, **options)
    module_name, _, attribute = name.partition(":")
    try:
        factory: Callable[..., object] = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise LocalError(
            ErrorCode.CONFIG,
            f"{name} cannot be imported: {error}. Write it as module:factory, with the module on Python's path",
        ) from error
    try:
        mover = factory(**options)
    except TypeError as error:
        raise LocalError(ErrorCode.CONFIG, f"{name} cannot be called: {error}") from error
    if not isinstance(mover, Mover):
        raise LocalError(
            ErrorCode.CONFIG,
            f"{name} returned a {type(mover).__name__}, which is no mover: it lacks some of its verbs",
        )
    return mover


def spell(factory: str | Callable[..., Mover]) -> str:
    """A factory's name, for another process.

    Raises:
        LocalError: CONFIG, for a factory that another process cannot import.
    """
    if isinstance(factory, str):
        return factory
    module, name = getattr(factory, "__module__", None), getattr(factory, "__qualname__", "<no name>")
    if module in {None, "__main__"} or not name.isidentifier():
        raise LocalError(
            ErrorCode.CONFIG,
            f"{factory!r} cannot be found by another process: give a function at the top of an importable module, "
            "or the mover's name",
        )
    return f"{module}:{name}"

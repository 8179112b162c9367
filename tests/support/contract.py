"""The rules of `engines.test_contract`, to be held against a mover that has its own way to be made."""

from __future__ import annotations

from collections.abc import Callable

from engines import test_contract

__all__ = ["rules"]


def rules(*, without: frozenset[str] = frozenset()) -> dict[str, Callable[..., None]]:
    """The tests by name, for a module to take up beside its own `make`.

    Arguments:
        without: rules that the mover does not claim to keep.
    """
    found = {name: test for name, test in vars(test_contract).items() if name.startswith("test_")}
    unknown = without - set(found)
    if unknown:
        raise ValueError(f"there are no rules {', '.join(sorted(unknown))}")
    return {name: test for name, test in found.items() if name not in without}

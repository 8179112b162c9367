"""The conformance kit: numbered rules that every mover keeps, checked between processes, without any test framework.

`pdhandoff conformance --mover NAME` runs it; so does `run_conformance`. It checks movers of any package. The names here
are imported when first used: the processes that a run starts need few of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdhandoff.testing.report import Report, Result, Verdict
    from pdhandoff.testing.rule import Need, Rule, Sizes
    from pdhandoff.testing.rules import ALL_RULES
    from pdhandoff.testing.runner import run_conformance

__all__ = ["ALL_RULES", "Need", "Report", "Result", "Rule", "Sizes", "Verdict", "run_conformance"]

_HOME = {
    "pdhandoff.testing.report": ("Report", "Result", "Verdict"),
    "pdhandoff.testing.rule": ("Need", "Rule", "Sizes"),
    "pdhandoff.testing.rules": ("ALL_RULES",),
    "pdhandoff.testing.runner": ("run_conformance",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value

"""How long it takes to import the library, in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

__all__ = ["main"]

REPEATS = 20
TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def fastest_s(statement: str) -> float:
    """Seconds that a statement takes as the first one of an interpreter: the least of several, as noise only adds."""
    command = [sys.executable, "-c", TIMED.format(statement)]
    runs = (subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(REPEATS))
    return min(float(run.stdout) for run in runs)


def main() -> list[dict[str, object]]:
    """Measure the import itself; the start of a bare interpreter is not in it."""
    return [
        {"name": statement, "value": fastest_s(statement) * 1e3, "unit": "ms", "reach": reach, "meaning": meaning}
        for statement, reach, meaning in (
            ("import pdhandoff", "<= 60", "in a fresh interpreter, without its own start"),
            ("from pdhandoff import *", "", "as above, with every public name"),
        )
    ]

"""Finds an interpreter that can serve vLLM with the connector, and says what is missing in one that cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["find_vllm_python"]

_WITHIN_S: Final = 60.0
# a folder named vllm on the path would be found too, without an origin
_LOOK: Final = """
import importlib.util, json, sys
found = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}
print(json.dumps([name for name, spec in found.items() if spec is None or spec.origin is None]))
"""


def find_vllm_python(given: Path | None, *, native: bool) -> Path:
    """The interpreter to start vLLM with.

    Args:
        given: what the user chose; None: `.venv-vllm/bin/python` in this folder or beside this interpreter's
            environment, else this interpreter.
        native: whether vLLM's own NIXL connector will run, too, which wants the package `nixl`.

    Raises:
        LocalError: CONFIG: none has all that is needed; it says what to install where.
    """
    needs = ["vllm", "pdhandoff_vllm", *(["nixl"] if native else [])]
    beside = Path(".venv-vllm/bin/python")
    candidates = [given] if given is not None else [Path.cwd() / beside, Path(sys.prefix).parent / beside]
    for python in candidates:
        if python.is_file():
            return _checked(python.absolute(), needs)  # not resolved: a link into an environment is its interpreter
    if given is not None:
        raise LocalError(ErrorCode.CONFIG, f"--vllm-python: there is no file {given}")
    return _checked(Path(sys.executable), needs)


def _checked(python: Path, needs: Iterable[str]) -> Path:
    try:
        look = subprocess.run(
            [str(python), "-c", _LOOK, *needs], capture_output=True, text=True, timeout=_WITHIN_S, check=True, cwd="/"
        )
        missing = json.loads(look.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise LocalError(ErrorCode.CONFIG, f"{python} is no Python interpreter that can be asked: {error}") from error
    if missing:
        raise LocalError(
            ErrorCode.CONFIG,
            f"{python} has no {', '.join(missing)}. Install vLLM and 'pdhandoff[nixl]' into one environment, for "
            "topology-b the package nixl too, and name its interpreter: --vllm-python PATH/bin/python",
        )
    return python

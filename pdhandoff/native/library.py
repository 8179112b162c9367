"""The compiled libraries: opened through cffi, checked, and their status codes turned into errors."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Final, final

from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["ABI_VERSION", "Library", "Unsupported", "open_library"]

ABI_VERSION: Final = 1
"PDH_ABI_VERSION of csrc/pdh_layout.h"

_FOLDER: Final = Path(__file__).parent
_INTERFACE: Final = "pdhandoff.native._abi"
_MISSING: Final = {
    "cpu": "install pdhandoff from its sources where a C++ compiler is on the PATH",
    "cuda": "install pdhandoff from its sources where nvcc is on the PATH",
}
_CODES: Final = {-1: ErrorCode.MISUSE, -2: ErrorCode.LAYOUT_MISMATCH, -3: ErrorCode.CONFIG, -4: ErrorCode.CONFIG}


class Unsupported(LocalError):
    """Rows that a compiled library cannot handle; the reference may."""


@final
class Library:
    """One library and its interface.

    Attributes:
        name: cpu or cuda.
        ffi: cffi's view of csrc/pdh_layout.h.
        functions: what it exports.

    """

    def __init__(self, name: str, ffi: Any, functions: Any) -> None:
        self.name: Final = name
        self.ffi: Final = ffi
        self.functions: Final = functions

    def check(self, status: int) -> int:
        """The status, if it is no error. Raises LocalError with the library's own sentence otherwise."""
        if status >= 0:
            return status
        reason = self.ffi.string(self.functions.pdh_last_error()).decode(errors="replace")
        kind = Unsupported if status == self.functions.PDH_UNSUPPORTED else LocalError
        raise kind(_CODES.get(status, ErrorCode.INTERNAL), f"{self.name} kernels: {reason}")


def open_library(name: str, folder: Path = _FOLDER) -> Library:
    """Open and check libpdh_{name}.so.

    Args:
        name: cpu or cuda.
        folder: where it lies.

    Raises:
        LocalError: it was not built, cannot be loaded, has another interface, or finds no device.

    """
    path = folder / f"libpdh_{name}.so"
    if not path.exists():
        raise _unusable(name, f"{path.name} was not built: {_MISSING[name]}")
    try:
        ffi = importlib.import_module(_INTERFACE).ffi
    except ModuleNotFoundError as error:
        raise _unusable(name, f"{error.name} is missing: install pdhandoff again") from error
    try:
        functions = ffi.dlopen(str(path))
    except OSError as error:
        raise _unusable(name, f"{path.name} cannot be loaded ({error}): build it again for this machine") from error
    _check_interface(name, ffi, functions)
    library = Library(name, ffi, functions)
    library.check(functions.pdh_devices())
    return library


def _check_interface(name: str, ffi: Any, functions: Any) -> None:
    """Refuse a library that was built from other sources."""
    again = "build it again (python hatch_build.py, in the project's folder)"
    try:
        version, sizes = functions.pdh_abi_version(), functions.pdh_abi_sizes()
    except AttributeError as error:
        raise _unusable(name, f"it lacks a function ({error}): {again}") from error
    if version != ABI_VERSION:
        raise _unusable(name, f"it has interface version {version}, this pdhandoff needs {ABI_VERSION}: {again}")
    expected = 0
    for kind in ("pdh_job", "pdh_part", "pdh_plane", "pdh_copy_block"):
        expected = expected << 16 | ffi.sizeof(kind)
    if sizes != expected:
        raise _unusable(name, f"its structures have sizes {sizes:#x}, expected {expected:#x}: {again}")


def _unusable(name: str, reason: str) -> LocalError:
    return LocalError(ErrorCode.CONFIG, f"the {name} kernels cannot be used: {reason}")

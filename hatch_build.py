"""Builds csrc/ into pdhandoff/native/ when a wheel or an editable install is made, or when it is run as a script.

The CPU library is built where a C++ compiler is found, the CUDA library where nvcc is. Without either the installation
succeeds and says so: pdhandoff then computes with torch, or with the library that there is.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cffi import FFI
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

__all__ = ["NativeBuildHook", "build"]

_COMPILERS = ("g++", "clang++", "c++")
_COMPILE_S = 900
"longest that one compiler may take"


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]  # hatchling is not where types are checked
    """Adds the libraries to wheels, which are then wheels for this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling names it
        """Called before a wheel, editable or not, is put together."""
        built = build(Path(self.root), self.app.display_warning)
        if not built:
            return
        build_data["artifacts"] += [str(path.relative_to(self.root)) for path in built]
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"


def build(root: Path, say: Callable[[str], object]) -> list[Path]:
    """Build what is out of date.

    Args:
        root: the project's folder.
        say: is told what could not be built, and why.

    Returns:
        The files that there are: libraries, and the Python module that describes their interface.

    """
    source, target = root / "csrc", root / "pdhandoff" / "native"
    inputs = [*source.iterdir(), root / "hatch_build.py"]
    built = [
        path
        for path, command in (
            (target / "libpdh_cpu.so", _cpu_command(source)),
            (target / "libpdh_cuda.so", _cuda_command(source)),
        )
        if _made(path, command, inputs, say)
    ]
    if built:
        interface = target / "_abi.py"
        if not _newer(interface, inputs):
            _write_interface(source / "pdh_layout.h", interface)
        built.append(interface)
    return built


def _cpu_command(source: Path) -> list[str] | str:
    """What builds the CPU library, without its output, or why nothing can."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        return f"the CPU library of pdhandoff was not built: none of {', '.join(_COMPILERS)} is on the PATH"
    flags = ["-std=c++17", "-O3", "-Wall", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off"]
    return [compiler, *flags, str(source / "pdh_cpu.cpp")]


def _cuda_command(source: Path) -> list[str] | str:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return "the CUDA library of pdhandoff was not built: nvcc is not on the PATH"
    targets = [
        f"-gencode=arch=compute_{arch},code={code}"
        for arch, code in ((90, "sm_90"), (100, "sm_100"), (90, "compute_90"))
    ]
    flags = ["-std=c++17", "-O3", "-shared", "-cudart=static", "--fmad=false", "-Xcompiler=-fPIC,-fvisibility=hidden"]
    return [nvcc, *flags, *targets, str(source / "pdh_cuda.cu")]


def _made(path: Path, command: Sequence[str] | str, inputs: Sequence[Path], say: Callable[[str], object]) -> bool:
    """Whether the library is there and up to date, made now if need be."""
    if isinstance(command, str):
        say(command)
        return path.exists()
    if _newer(path, inputs):
        return True
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        done = subprocess.run(
            [*command, "-o", str(made)],
            capture_output=True,
            text=True,
            timeout=_COMPILE_S,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
        if done.returncode != 0:
            path.unlink(missing_ok=True)  # a library of older sources would be worse than none
            say(f"{path.name} was not built: {command[0]} failed with {done.returncode}:\n{done.stderr[-2000:]}")
            return False
        made.replace(path)
    return True


def _newer(path: Path, inputs: Sequence[Path]) -> bool:
    return path.exists() and path.stat().st_mtime >= max(each.stat().st_mtime for each in inputs)


def _write_interface(header: Path, path: Path) -> None:
    """The part of the header between its markers as a module that cffi loads without parsing C."""
    text = header.read_text()
    start, stop = text.index("/* cdef begin */"), text.index("/* cdef end */")
    ffi = FFI()
    ffi.cdef(text[start:stop].replace("PDH_EXPORT ", ""))
    ffi.set_source("pdhandoff.native._abi", None)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        with contextlib.redirect_stdout(io.StringIO()):  # cffi prints what it writes
            ffi.emit_python_code(str(made))
        made.replace(path)


if __name__ == "__main__":
    build(Path(__file__).resolve().parent, lambda sentence: sys.stderr.write(f"{sentence}\n"))

"""The Python files of the published TileRT package: fetched once, kept outside the tree, read and never imported.

The engine itself runs on eight GPUs only. What the adapter relies on is in these files, and single functions of them
run on CPU tensors, over a `torch` whose devices are all the CPU.
"""

from __future__ import annotations

import ast
import copy
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["VERSION", "HostTensor", "Published", "fetch", "host_torch"]

VERSION: Final = "0.1.6.post3"
_SHA256: Final = "d6fbf0a55be1fbde8869cb31412f33bfd4a82a2a73786651b61ab8dfff69de25"
_PIP: Final = (
    "--disable-pip-version-check --quiet --retries 1 --timeout 15 download --no-deps --require-hashes "
    "--python-version 3.12 --platform manylinux_2_28_x86_64 --only-binary=:all:"
)
_FETCH_S: Final = 90.0


def fetch() -> Path | str:
    """The folder with the package's Python files, or why there is none."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdhandoff"
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"tilert {VERSION} has no place in a cache folder: {error}"
    kept = home / f"tilert-{VERSION}"
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes run side by side
        if not kept.is_dir():
            with tempfile.TemporaryDirectory(dir=home) as scratch:
                problem = _download(Path(scratch))
                if problem:
                    return problem
                (wheel,) = Path(scratch).glob("*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(
                        Path(scratch, "files"), [name for name in archive.namelist() if name.endswith(".py")]
                    )
                shutil.move(Path(scratch, "files"), kept)
    return kept


def _download(folder: Path) -> str:
    wanted = folder / "wanted.txt"
    wanted.write_text(f"tilert=={VERSION} --hash=sha256:{_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", *_PIP.split(), "--dest", str(folder), "--requirement", str(wanted)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_S, check=False)
    except subprocess.TimeoutExpired:
        return f"tilert {VERSION} could not be downloaded within {_FETCH_S:.0f} s: is the package index within reach?"
    if done.returncode:
        assert "DO NOT MATCH THE HASHES" not in done.stderr, done.stderr
        last = done.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
        return f"tilert {VERSION} could not be downloaded; is the package index within reach? {last[0]}"
    return ""


class HostTensor(Tensor):
    """A tensor that stays where it is when it is sent to a GPU."""

    def to(self, *args: Any, **more: Any) -> Any:
        target = args[0] if args else more.get("device")
        return self if isinstance(target, str) and target.startswith("cuda") else super().to(*args, **more)


class _HostTorch:
    """`torch` without GPUs: what is made on one is made on the CPU, and nothing is waited for."""

    cuda = SimpleNamespace(synchronize=lambda *_: None)

    def __getattr__(self, name: str) -> Any:
        real = getattr(torch, name)
        if name not in {"zeros", "full", "tensor"}:
            return real

        def made(*args: Any, **more: Any) -> Any:
            if str(more.get("device", "cpu")).startswith("cuda"):
                more["device"] = "cpu"
            return real(*args, **more).as_subclass(HostTensor)

        return made


host_torch: Final = _HostTorch()


class Published:
    """The package, by module (`models.glm_5.generator`).

    Args:
        folder: of its Python files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trees: dict[str, ast.Module] = {}

    def tree(self, module: str) -> ast.Module:
        """A module, parsed."""
        if module not in self._trees:
            path = self._folder.joinpath("tilert", *module.split(".")).with_suffix(".py")
            self._trees[module] = ast.parse(path.read_text(encoding="utf-8"))
        return self._trees[module]

    def definition(self, module: str, name: str) -> ast.FunctionDef | ast.ClassDef:
        """`function`, `Class` or `Class.method`."""
        found: ast.Module | ast.FunctionDef | ast.ClassDef = self.tree(module)
        for part in name.split("."):
            found = next(
                node for node in found.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part
            )
        assert isinstance(found, ast.FunctionDef | ast.ClassDef)
        return found

    def signature(self, module: str, name: str) -> list[str]:
        """Arguments in order, `name` or `name=default`."""
        function = self.definition(module, name)
        assert isinstance(function, ast.FunctionDef)
        arguments = function.args
        assert [*arguments.kwonlyargs, *arguments.posonlyargs] == []
        defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + list(arguments.defaults)
        return [
            argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"
            for argument, default in zip(arguments.args, defaults, strict=True)
        ]

    def constants(self, module: str, name: str) -> dict[str, Any]:
        """What a class assigns to its names, literals only."""
        definition = self.definition(module, name)
        found: dict[str, Any] = {}
        for node in definition.body:
            target, value = None, None
            if isinstance(node, ast.Assign):
                target, value = node.targets[0], node.value
            elif isinstance(node, ast.AnnAssign):
                target, value = node.target, node.value
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant | ast.BinOp):
                found[target.id] = eval(compile(ast.Expression(value), module, "eval"), {})  # noqa: S307 - a literal
        return found

    def value(self, module: str, name: str) -> Any:
        """What a module assigns to one of its names, a literal."""
        for node in self.tree(module).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AnnAssign):
                targets = [node.target]
            if any(ast.unparse(target) == name for target in targets):
                assert isinstance(node, ast.Assign | ast.AnnAssign)
                assert node.value is not None
                return ast.literal_eval(node.value)
        raise KeyError(name)

    def function(self, module: str, name: str, names: Mapping[str, Any]) -> Callable[..., Any]:
        """One function or method, compiled by itself.

        Args:
            module: where it is.
            name: `function` or `Class.method`.
            names: its globals; `Base` is the class that a method's `super()` goes to.
        """
        definition = _plain(self.definition(module, name))
        outer, _, inner = name.rpartition(".")
        body: ast.stmt = definition
        if outer:
            owner = ast.parse(f"class {outer}(Base): pass").body[0]
            assert isinstance(owner, ast.ClassDef)
            owner.body = [definition]
            body = owner
        space: dict[str, Any] = {"Base": object, **names}
        code = compile(ast.fix_missing_locations(ast.Module([body], [])), module, "exec", dont_inherit=True)
        exec(code, space)  # noqa: S102 - that file's own code, which is what is being tested
        made: Callable[..., Any] = getattr(space[outer], inner) if outer else space[inner]
        return made

    def source(self, module: str, name: str) -> str:
        """A definition as text, without comments, on however many lines."""
        return ast.unparse(self.definition(module, name))


def _plain(definition: ast.FunctionDef | ast.ClassDef) -> ast.FunctionDef | ast.ClassDef:
    """A copy without annotations, which name things that are not here, and without decorators."""
    copy_of = copy.deepcopy(definition)
    for node in ast.walk(copy_of):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    copy_of.decorator_list = []
    return copy_of

"""Promises of the repository itself: what an import costs, what no file may hold, what the README may name."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [ROOT / "pdhandoff", *(path for path in ROOT.glob("adapters/*/pdhandoff_*") if path.is_dir())]
MODULES = sorted(module for package in PACKAGES for module in package.rglob("*.py"))
SKIPPED = {"__pycache__", "_build", "_generated", "bench-out", "build", "demo-out", "dist"}
TEXT = {".cfg", ".css", ".in", ".js", ".json", ".md", ".py", ".pyi", ".sh", ".svg", ".toml", ".txt", ".yaml", ".yml"}
HEAVY = ("matplotlib", "mooncake", "nixl", "numpy", "torch", "vllm")
IMPURE = (*HEAVY, "asyncio", "logging", "multiprocessing", "random", "socket", "threading")


@cache
def text_files() -> dict[Path, str]:
    """Every text file that belongs to the project, by its path in it."""
    found = {}
    for folder, names, files in os.walk(ROOT):
        names[:] = [n for n in names if n not in SKIPPED and (not n.startswith(".") or n == ".ci")]
        for path in (Path(folder, file) for file in files):
            if path.suffix in TEXT or path.name in {"LICENSE", "Makefile", "environment", "run"}:
                found[path.relative_to(ROOT)] = path.read_text(encoding="utf-8")
    return found


def loaded_by(statement: str, modules: tuple[str, ...], *, given: str = "pass") -> set[str]:
    """Which of `modules` a fresh interpreter loads for `statement`, beyond what `given` has loaded already."""
    script = f"import sys\n{given}\nbefore = set(sys.modules)\n{statement}\nprint(*(set(sys.modules) - before))"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(run.stdout.split()).intersection(modules)


@pytest.mark.slow
@pytest.mark.parametrize("statement", ["import pdhandoff", "from pdhandoff import *"])
def test_importing_the_library_imports_nothing_heavy(statement: str) -> None:
    assert loaded_by(statement, HEAVY) == set()


@pytest.mark.slow
@pytest.mark.parametrize("package", ["errors", "ids", "layouts", "limits", "planner", "protocol"])
def test_the_pure_core_imports_nothing_impure(package: str) -> None:
    # the library itself gives its logger a handler that says nothing
    assert loaded_by(f"import pdhandoff.{package}", IMPURE, given="import pdhandoff") == set()


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(ROOT)))
def test_a_public_module_says_what_it_offers(module: Path) -> None:
    tree = ast.parse(module.read_text(encoding="utf-8"))
    if module.name == "__main__.py" or (module.name.startswith("_") and module.name != "__init__.py"):
        return
    if module.name == "__init__.py" and all(isinstance(node, ast.Expr | ast.Import) for node in tree.body):
        return  # a package that defines nothing itself
    exported = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    ]
    assert exported, "has no __all__"
    names = ast.literal_eval(exported[0])
    assert len(set(names)) == len(names)
    defined = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    defined |= {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
    }
    defined |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assert set(names) <= defined


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(ROOT)))
def test_a_module_is_small_and_checks_input_without_assert(module: Path) -> None:
    text = module.read_text(encoding="utf-8")
    assert text.count("\n") <= 500
    for node in ast.walk(ast.parse(text)):
        assert not isinstance(node, ast.Assert), f"line {node.lineno}: assert outside tests"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: bare except"


def test_no_file_names_a_folder_of_somebodys_machine() -> None:
    # spelled in pieces, so that this file passes itself
    pattern = re.compile(r"(?<![\w.])/(?:wo" + "rk|ro" + r"ot|ho" + r"me/\w+|Us" + r"ers/\w+)/")
    found = [
        f"{path}:{number}: {line.strip()[:100]}"
        for path, text in text_files().items()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_no_file_names_a_package_registry() -> None:
    names = re.compile(
        "py" + r"pi\.org|down" + r"load\.pytorch|files\.python" + "hosted|--index-" + "url|find-" + "links"
    )
    assert [str(path) for path, text in text_files().items() if names.search(text)] == []


def test_no_folder_shadows_an_engine() -> None:
    """`import vllm` must not succeed because a folder of that name lies on sys.path with an `__init__.py` in it."""
    assert list(ROOT.glob("adapters/__init__.py")) == []
    assert list(ROOT.glob("adapters/*/__init__.py")) == []
    assert [
        path for path in (ROOT / "tests").iterdir() if path.name in {"mooncake", "nixl", "tilert", "torch", "vllm"}
    ] == []


def test_the_readmes_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert named <= targets
    assert {"demo", "test"} <= named


def test_the_readmes_links_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text) + re.findall(
            r'(?:src|srcset)="([^"]+)"', text
        )
        assert [target for target in targets if not (ROOT / target).exists()] == []


def test_continuous_integration_runs_what_the_readme_says() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "set -euo pipefail" in script
    assert re.search(r"^make test$", script, flags=re.MULTILINE)
    assert re.search(r"^make lint$", script, flags=re.MULTILINE)


def test_pinned_packages_are_pinned() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert line.startswith(("#", "-r ")) or re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][\w.]*", line), (
                f"{path.name}: {line}"
            )

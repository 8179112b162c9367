"""The build hook: what it does without a compiler, with a broken one, and when sources change."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the sources that the hook reads."""
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    shutil.copy(ROOT / "hatch_build.py", tmp_path)
    (tmp_path / "pdhandoff" / "native").mkdir(parents=True)
    return tmp_path


def compiler(folder: Path, name: str, script: str) -> None:
    """A program of that name, alone on the PATH."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!{sys.executable}\nimport pathlib, sys\n{script}\n")
    program.chmod(0o755)


def test_without_compilers_nothing_is_built_and_it_says_so(
    hook: ModuleType, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(project))
    said: list[str] = []
    assert hook.build(project, said.append) == []
    assert [sentence.split(" was not built")[0] for sentence in said] == [
        "the CPU library of pdhandoff",
        "the CUDA library of pdhandoff",
    ]
    assert not any((project / "pdhandoff" / "native").iterdir())


def test_a_compiler_that_fails_is_named_and_leaves_no_old_library(
    hook: ModuleType, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(project / "bin", "g++", "sys.exit('no such standard')")
    monkeypatch.setenv("PATH", str(project / "bin"))
    old = project / "pdhandoff" / "native" / "libpdh_cpu.so"
    old.write_bytes(b"of older sources")
    os.utime(old, (1, 1))
    said: list[str] = []
    assert hook.build(project, said.append) == []
    assert "libpdh_cpu.so was not built" in said[0]
    assert "no such standard" in said[0]
    assert not old.exists()


def test_only_what_is_out_of_date_is_built(hook: ModuleType, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = project / "log"
    compiler(
        project / "bin",
        "g++",
        f"open({str(log)!r}, 'a').write('built ')\npathlib.Path(sys.argv[sys.argv.index('-o') + 1]).write_bytes(b'')",
    )
    monkeypatch.setenv("PATH", str(project / "bin"))
    said: list[str] = []
    first = hook.build(project, said.append)
    assert [path.name for path in first] == ["libpdh_cpu.so", "_abi.py"]
    assert hook.build(project, said.append) == first
    assert log.read_text() == "built "
    later = first[0].stat().st_mtime + 5
    os.utime(project / "csrc" / "pdh_math.h", (later, later))
    hook.build(project, said.append)
    assert log.read_text() == "built built "

from __future__ import annotations

import subprocess
import sys

import pytest

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.native import Native, load


def test_the_reference_is_found_by_name_and_by_default() -> None:
    for native in (load(), load("reference")):
        assert native.name == "reference"
        assert isinstance(native, Native)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(LocalError, match="'cobol'") as caught:
        load("cobol")
    assert caught.value.code is ErrorCode.CONFIG


def forget(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """As if `missing` were not installed and nothing of ours had been imported yet."""
    for name in [name for name in sys.modules if name.startswith("pdhandoff.native.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)


def test_without_torch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, "torch")
    with pytest.raises(LocalError, match=r"needs? torch.*install pdhandoff\[demo\]") as caught:
        load()
    assert caught.value.code is ErrorCode.CONFIG


def test_another_missing_module_is_not_blamed_on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, "pdhandoff.native.digest")
    with pytest.raises(ModuleNotFoundError, match=r"pdhandoff\.native\.digest"):
        load()


def test_raw_copies_and_the_choice_itself_do_not_import_torch() -> None:
    code = "import sys, pdhandoff.native, pdhandoff.native.memmove; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.native import PREFERENCE_VARIABLE, Native, library, load

BUILT = Path(library.__file__).with_name("libpdh_cpu.so").exists()
needs_cpu = pytest.mark.skipif(not BUILT, reason="the CPU library is not built here")


@needs_cpu
def test_the_compiled_library_is_the_default(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pdhandoff.native"):
        native = load()
    assert native.name == "cpu"
    assert isinstance(native, Native)
    assert [record.message for record in caplog.records] == ["conversions: cpu"]


def test_the_reference_is_found_by_name() -> None:
    native = load("reference")
    assert native.name == "reference"
    assert isinstance(native, Native)


def test_the_environment_names_one_and_the_argument_wins(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(PREFERENCE_VARIABLE, "reference")
    with caplog.at_level(logging.INFO, "pdhandoff.native"):
        assert load().name == "reference"
    assert caplog.messages == ["conversions: reference, as asked for"]
    monkeypatch.setenv(PREFERENCE_VARIABLE, "cobol")
    assert load("reference").name == "reference"
    with pytest.raises(LocalError, match="'cobol'"):
        load()


def test_without_the_library_the_reference_serves_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    opened = library.open_library
    monkeypatch.setattr(library, "open_library", lambda name: opened(name, tmp_path))
    with caplog.at_level(logging.INFO, "pdhandoff.native"):
        assert load().name == "reference"
    assert "conversions: reference" in caplog.text
    assert "libpdh_cpu.so was not built" in caplog.text
    with pytest.raises(LocalError, match=r"libpdh_cuda\.so was not built.*nvcc") as caught:
        load("cuda")
    assert caught.value.code is ErrorCode.CONFIG


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "libpdh_cpu.so").write_bytes(b"nothing of the kind")
    with pytest.raises(LocalError, match=r"libpdh_cpu\.so cannot be loaded"):
        library.open_library("cpu", tmp_path)


@needs_cpu
def test_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ABI_VERSION", 99)
    with pytest.raises(LocalError, match="interface version 1, this pdhandoff needs 99: build it again"):
        library.open_library("cpu")


@needs_cpu
def test_a_missing_description_of_the_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pdhandoff.native._abi", None)
    with pytest.raises(LocalError, match=r"pdhandoff\.native\._abi is missing"):
        library.open_library("cpu")


@needs_cpu
def test_the_version_is_the_headers() -> None:
    header = Path(__file__).parents[2] / "csrc" / "pdh_layout.h"
    assert f"#define PDH_ABI_VERSION {library.ABI_VERSION}u" in header.read_text()


@needs_cpu
def test_the_cpu_library_works_without_torch() -> None:
    code = (
        "import sys, pdhandoff.native as n; sys.modules['torch'] = None; n.load('cpu');"
        "import pdhandoff.native.compiled; sys.exit(any(m.startswith('torch.') for m in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


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
        load("reference")
    assert caught.value.code is ErrorCode.CONFIG


def test_another_missing_module_is_not_blamed_on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, "pdhandoff.native.digest")
    with pytest.raises(ModuleNotFoundError, match=r"pdhandoff\.native\.digest"):
        load("reference")


def test_raw_copies_and_the_choice_itself_do_not_import_torch() -> None:
    code = "import sys, pdhandoff.native, pdhandoff.native.memmove; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

"""Subcommands that other packages bring: found by name, listed, and never in the way of the library's own."""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys

import pytest

from pdhandoff.cli.installed import GROUP, add_installed
from pdhandoff.errors import LocalError

__all__ = ["declares_another", "good", "raises"]


def good(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """As a package would have it."""
    parser = commands.add_parser("extra", help="an extra one")
    parser.add_argument("--number", type=int)
    parser.set_defaults(run=lambda options: options.number)


def declares_another(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares a name that it is not known by."""
    commands.add_parser("something-else")


def raises(_commands: object) -> None:
    """Broken."""
    raise RuntimeError("broken\nin two lines")


def entry(name: str, attribute: str, monkeypatch: pytest.MonkeyPatch) -> importlib.metadata.EntryPoint:
    monkeypatch.setitem(sys.modules, "installed_extras", sys.modules[__name__])
    return importlib.metadata.EntryPoint(name, f"installed_extras:{attribute}", GROUP)


def parse(entries: list[importlib.metadata.EntryPoint], *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    commands.add_parser("demo").set_defaults(run="the library's own")
    add_installed(commands, entries)
    return parser.parse_args(arguments)


def test_an_installed_subcommand_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse([entry("extra", "good", monkeypatch)], "extra", "--number", "3")
    assert options.run(options) == 3


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("raises", "RuntimeError: broken in two lines"),
        ("absent", "AttributeError"),
        ("declares_another", "declares no"),
    ],
)
def test_one_that_cannot_be_loaded_says_so_when_it_is_run(
    attribute: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [entry("broken", attribute, monkeypatch), entry("extra", "good", monkeypatch)]
    options = parse(entries, "broken", "--any", "thing")
    with pytest.raises(LocalError, match=words):
        options.run(options)
    assert parse(entries, "extra").number is None


def test_no_package_replaces_a_subcommand_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse([entry("demo", "good", monkeypatch)], "demo").run == "the library's own"


@pytest.mark.slow
def test_help_lists_them_and_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom pdhandoff.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'starlette', 'uvicorn', 'numpy', 'vllm'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "serve-decode" in run.stdout
    assert run.stdout.rstrip().endswith("[]")

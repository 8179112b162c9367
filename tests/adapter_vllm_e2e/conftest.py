"""These tests need vLLM, which has an environment of its own: `make test` runs them there."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

_HAS_VLLM = find_spec("vllm") is not None
collect_ignore_glob = [] if _HAS_VLLM else ["test_*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _HAS_VLLM:
        terminalreporter.write_line("suites that did not run here: a real vLLM (make test has an environment for it)")


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Real servers, started when a test first asks for them; few live at the same time."""
    from support.vllm_servers import Servers

    folder: Path = tmp_path_factory.mktemp("servers")
    with Servers(folder) as servers:
        yield servers

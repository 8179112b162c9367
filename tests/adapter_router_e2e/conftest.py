"""These tests start real vLLM servers, whose packages are in an environment of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.up import VLLM_INSTALLED

_HERE = Path(__file__).parent
_REASON = "vllm: there is no .venv-vllm here (make test makes it where it can)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == _HERE and item.path.name.startswith("test_topology") and not VLLM_INSTALLED.exists():
            item.add_marker(pytest.mark.skip(reason=_REASON))

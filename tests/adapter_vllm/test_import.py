"""The package is imported in three kinds of process: it must be cheap, and without effects (trap 14)."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

import pdhandoff_vllm

_QUIET = """
import socket, sys, threading
def refuse(*_, **__): raise SystemExit("a socket was opened")
socket.socket.__init__ = refuse
import pdhandoff_vllm
from pdhandoff_vllm import build, config, scheduler_side, worker_side
heavy = {"vllm", "torch", "numpy", "nixl", "mooncake"} & set(sys.modules)
print(sorted(heavy), threading.active_count())
"""


@pytest.mark.slow
def test_it_needs_neither_vllm_nor_torch_nor_a_socket() -> None:
    done = subprocess.run([sys.executable, "-c", _QUIET], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["[]", "1"]


def test_it_says_what_it_does_not_have() -> None:
    with pytest.raises(AttributeError, match="OtherConnector"):
        _ = pdhandoff_vllm.OtherConnector


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_connectors_cannot_be_imported() -> None:
    with pytest.raises(ModuleNotFoundError, match="vllm"):
        _ = pdhandoff_vllm.PDHandoffConnector

"""`pdhandoff up` with small processes in the place of its real ones: `up_child.py BEHAVIOUR... --ready-file PATH`.

Behaviours, one per process: `serves`; `dies` (says something and ends), `silent` (never gets ready), `stubborn`
(serves, ignores SIGTERM and has a child that does, too).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final
from unittest.mock import patch

from rich.console import Console

from pdhandoff.cli import main
from pdhandoff_router.up import command, processes, run
from pdhandoff_router.up.processes import Part, free_ports
from pdhandoff_router.up.topology import Choices, Plan, Topology

_PART: Final = """
import http.server, signal, subprocess, sys, threading
behaviour, port = sys.argv[1], int(sys.argv[2])
print("this is", behaviour, flush=True)
if behaviour == "dies":
    sys.exit("cannot go on")
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the child inherits it
    child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait(300)"])
    print("child", child.pid, flush=True)
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if behaviour == "silent" else 200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Page).serve_forever()
"""


def _plan(behaviours: list[str]) -> Plan:
    parts = [
        Part(
            name=f"{behaviour}-{number}",
            about="pretended",
            command=(sys.executable, "-c", _PART, behaviour, str(port)),
            url=f"http://127.0.0.1:{port}",
        )
        for number, (behaviour, port) in enumerate(zip(behaviours, free_ports(len(behaviours)), strict=True))
    ]
    return Plan(
        engines=parts[:-1], router=parts[-1:], prefill="", native=None, decode=[], controls=[], url=parts[-1].url
    )


def _main() -> int:
    *behaviours, _, ready = sys.argv[1:]
    choices = Choices(
        topology=Topology.A,
        model=Path("none"),
        name="none",
        folder=Path(ready).parent,
        vllm_python=Path(sys.executable),
    )
    with (
        patch.object(run, "plan", lambda _: _plan(behaviours)),
        patch.object(processes, "WITHIN_S", 1.0),
        patch.object(
            command,
            "_run",
            lambda _: run.Run(choices, Console(stderr=True), ready_file=Path(ready), within_s=5.0).run(),
        ),
    ):
        return main(["up", "topology-a"])


if __name__ == "__main__":
    sys.exit(_main())

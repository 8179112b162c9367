"""`pdhandoff up`: a whole topology on this machine. Nothing heavy is imported before it runs."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdhandoff.cli.options import seconds
from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff_router.command import need

if TYPE_CHECKING:
    from pdhandoff_router.up.topology import Choices

__all__ = ["add_parser"]

_TINY: Final = "tiny"
_NEEDS: Final = ("httpx", "prometheus_client", "rich", "safetensors", "starlette", "torch", "uvicorn")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "up",
        help="start vLLM, decode nodes and a router on this machine, to try a whole topology",
        description="Starts every process of a topology on 127.0.0.1, without a GPU, waits until all are ready, and "
        "says how to ask it something. topology-a: a vLLM that prefills, decode nodes, a router. topology-b: beside "
        "them a vLLM that decodes by vLLM's own NIXL connector, fed by the same prefill server. Ctrl-C ends them all. "
        "Exit status 1: one of them failed; the end of its log is shown.",
    )
    parser.add_argument("topology", choices=("topology-a", "topology-b"))
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="in Hugging Face's format (default: a tiny one)")
    parser.add_argument("--name", help="what clients call the model (default: the folder's name)")
    parser.add_argument(
        "--vllm-python",
        type=Path,
        metavar="PATH",
        help="interpreter that has vLLM and pdhandoff (default: .venv-vllm/bin/python if there is one, else this one)",
    )
    parser.add_argument(
        "--vllm-arg", action="append", default=[], metavar="ARG", help="for each vLLM server, as --vllm-arg=--seed=1"
    )
    parser.add_argument("--mover", default="nixl", metavar="NAME", help="of the handoffs (default: %(default)s)")
    parser.add_argument("--decode-nodes", type=int, choices=range(1, 17), default=1, metavar="N", help="(default: 1)")
    parser.add_argument("--dtype", default="float32", help="of the model and its caches (default: %(default)s)")
    parser.add_argument("--max-model-len", type=int, default=1024, metavar="TOKENS", help="(default: %(default)s)")
    parser.add_argument("--port", type=_port, default=0, help="of the router (default: any, which is shown)")
    parser.add_argument("--no-router", action="store_true", help="start all but the router: for one of your own")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of logs (default: a new temporary one)")
    parser.add_argument(
        "--ready-file", type=Path, metavar="PATH", help="gets URLs and process ids as JSON while everything runs"
    )
    parser.add_argument(
        "--within", type=seconds, default=300.0, metavar="SECONDS", help="for the whole start (default: %(default)g)"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    need("pdhandoff up", _NEEDS, "demo,node,router")
    from rich.console import Console

    from pdhandoff_router.up.run import Run

    console = Console(stderr=True)
    ready_file = None if options.ready_file is None else options.ready_file.absolute()
    return Run(_choices(options), console, ready_file=ready_file, within_s=options.within).run()


def _choices(options: argparse.Namespace) -> Choices:
    """Make what is missing. Raises LocalError (CONFIG)."""
    from pdhandoff_router.up.tiny_model import make_tiny_model
    from pdhandoff_router.up.topology import Choices, Topology
    from pdhandoff_router.up.vllm_python import find_vllm_python

    if options.max_model_len < 2:
        raise LocalError(
            ErrorCode.CONFIG, f"--max-model-len: {options.max_model_len} tokens are too few: give 2 or more"
        )
    topology = Topology(options.topology)
    python = find_vllm_python(options.vllm_python, native=topology is Topology.B)
    try:
        if options.out is None:
            folder = Path(tempfile.mkdtemp(prefix="pdhandoff-up-"))
        else:
            folder = options.out.absolute()
            folder.mkdir(parents=True, exist_ok=True)
        model = make_tiny_model(folder / _TINY) if options.model is None else options.model.absolute()
    except OSError as error:
        raise LocalError(ErrorCode.CONFIG, f"--out: {error.filename} cannot be written: {error.strerror}") from error
    return Choices(
        topology=topology,
        model=model,
        name=options.name or model.name,
        folder=folder,
        vllm_python=python,
        mover=options.mover,
        decode_nodes=options.decode_nodes,
        port=options.port,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        vllm_arguments=tuple(options.vllm_arg),
        router=not options.no_router,
    )


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is no port from 0 to 65535")
    return int(text)

"""`pdhandoff demo`: the project's main job on one machine, in two processes."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pdhandoff.cli.options import mover_option
from pdhandoff.errors import ErrorCode, LocalError

if TYPE_CHECKING:
    from pdhandoff.demo.run import DemoOptions

__all__ = ["add_parser"]

_DEFAULT_PROMPTS = (300, 180, 421, 129)
_STEPS = {
    "producer": ("offer", "grant", "gather", "write", "commit"),
    "consumer": ("landed", "ready", "convert", "decode"),
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "demo",
        help="hand real prefills from one process to another, decode, and compare every token",
        description="Starts a prefill and a decode process with a tiny real model (latent attention, indexer, MTP), "
        "hands requests off chunk by chunk while prefill is running, decodes them, and compares every token with the "
        "same engine after a prefill in its own process. Exit status 0: everything went as promised.",
    )
    parser.add_argument(
        "--prompts",
        type=_lengths,
        default=_DEFAULT_PROMPTS,
        metavar="N,N,...",
        help="tokens of each request's prompt (default: %(default)s)",
    )
    parser.add_argument("--requests", type=int, metavar="N", help="this many requests; prompt lengths repeat")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of one prefill chunk (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens to decode (default: %(default)s)")
    parser.add_argument("--mover", default="loopback", help="transfer engine (default: %(default)s)")
    parser.add_argument(
        "--mover-option",
        action="append",
        default=[],
        type=mover_option,
        metavar="KEY=VALUE",
        help="an option of the mover, as JSON where it is JSON and as text otherwise; may be repeated",
    )
    parser.add_argument(
        "--listen",
        default="127.0.0.1:0",
        help="control address of the decode process, [::1]:0 for IPv6 (default: %(default)s)",
    )
    parser.add_argument(
        "--corrupt",
        action="store_true",
        help="flip a byte of the first write: its request must be refused before its first token",
    )
    parser.add_argument("--kill", choices=sorted(_STEPS), help="kill this side in the middle, then run all again")
    parser.add_argument(
        "--at", metavar="STEP", help="; ".join(f"{side}: {', '.join(steps)}" for side, steps in _STEPS.items())
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="folder of logs and pictures (default: %(default)s)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON, and nothing else, on standard output"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    chosen = _options(options)
    for package in ("torch", "matplotlib", "rich"):
        if importlib.util.find_spec(package) is None:
            raise LocalError(ErrorCode.CONFIG, f"the demo needs {package}: pip install 'pdhandoff[demo]'")
    import msgspec
    from rich.console import Console

    from pdhandoff.demo.report import make_report, print_report, write_pictures
    from pdhandoff.demo.run import run_demo

    console = Console(file=sys.stderr if options.json else sys.stdout, highlight=False)
    result = run_demo(chosen, lambda text: console.print(f"[dim]- {text}[/]"))
    timeline, trace = write_pictures(result, chosen.out)
    report = make_report(result, timeline=timeline, trace=trace)
    if options.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        print_report(report, console)
    return 0 if report.ok else 1


def _options(options: argparse.Namespace) -> DemoOptions:
    from pdhandoff.demo.run import DemoOptions

    prompts = tuple(options.prompts)
    if options.requests is not None:
        prompts = tuple(prompts[index % len(prompts)] for index in range(options.requests))
    at = options.at
    if options.kill is not None:
        steps = _STEPS[options.kill]
        at = at or steps[len(steps) // 2]
        if at not in steps:
            raise LocalError(ErrorCode.CONFIG, f"--at {at}: a {options.kill} can be killed at {', '.join(steps)}")
    elif at is not None:
        raise LocalError(ErrorCode.CONFIG, "--at says when to --kill: name the producer or the consumer too")
    if options.corrupt and options.kill is not None:
        raise LocalError(ErrorCode.CONFIG, "--corrupt and --kill are two demonstrations: choose one")
    if not prompts or min(prompts) < 1 or options.chunk < 1 or options.max_tokens < 1:
        raise LocalError(ErrorCode.CONFIG, "prompts, chunk and tokens must be at least 1")
    return DemoOptions(
        prompts=prompts,
        chunk=options.chunk,
        max_tokens=options.max_tokens,
        mover=options.mover,
        mover_options=dict(options.mover_option),
        listen=options.listen,
        corrupt=options.corrupt,
        kill=options.kill,
        at=at,
        out=options.out,
    )


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 300,180") from None

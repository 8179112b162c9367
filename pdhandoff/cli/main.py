"""`pdhandoff`: one module for each subcommand; heavy packages are imported by the one that runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import pdhandoff
from pdhandoff.cli import conformance, demo, doctor
from pdhandoff.cli.installed import add_installed
from pdhandoff.errors import PdHandoffError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Returns the exit status: 0 as promised, 1 not so, 2 unknown options, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="pdhandoff", description="Let one LLM engine's prefill continue in another engine's decode."
    )
    parser.add_argument("--version", action="version", version=f"pdhandoff {pdhandoff.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo.add_parser(commands)
    doctor.add_parser(commands)
    conformance.add_parser(commands)
    add_installed(commands)
    options = parser.parse_args(argv)
    try:
        status: int = options.run(options)
    except PdHandoffError as error:
        print(f"pdhandoff: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pdhandoff: interrupted; every process that was started has been ended", file=sys.stderr)
        return 130
    return status

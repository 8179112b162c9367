"""`pdhandoff doctor`: what keeps handoffs from working on this machine, and what to do about it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pdhandoff.cli.options import mover_option, read_secret
from pdhandoff.errors import ErrorCode, LocalError

if TYPE_CHECKING:
    from pdhandoff.cli.checks.finding import Check, Finding
    from pdhandoff.cli.checks.system import System

__all__ = ["add_parser"]

_WITHIN_S = 30.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine, its movers and a peer, and say what to do about what is wrong",
        description="Checks versions, limits, addresses and every installed mover: makes it in two processes, "
        "registers memory, writes a page from one into the other and compares it. Nothing outside this machine is "
        "contacted, except the --peer. Exit status 0: there is no PROBLEM.",
    )
    parser.add_argument(
        "--mover",
        action="append",
        default=[],
        metavar="NAME",
        help="only this mover, which must then be installed; again for more; module:factory for one that is not "
        "declared (default: all that are installed)",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=mover_option,
        metavar="KEY=VALUE",
        help="an option of the one --mover; the value is JSON, or text",
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="the control address of a consumer that is to run here, e.g. 10.0.0.5:5556",
    )
    parser.add_argument("--peer", metavar="HOST:PORT", help="the control address of a consumer that is running")
    parser.add_argument("--secret-file", type=Path, metavar="PATH", help="holds the secret that the peer shares")
    parser.add_argument(
        "--within",
        type=_seconds,
        default=_WITHIN_S,
        metavar="SECONDS",
        help="how long each step may take (default: %(default)g)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print findings as JSON, and nothing else, on standard output"
    )
    parser.set_defaults(run=_run)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds between 0 and 3600")
    return seconds


def _run(options: argparse.Namespace) -> int:
    import msgspec

    from pdhandoff.cli.checks.finding import Report
    from pdhandoff.cli.checks.show import collect, print_findings
    from pdhandoff.cli.checks.system import System

    findings = collect(list(_checks(options, System.here())))
    report = Report.of(findings)
    if options.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        print_findings(findings, sys.stdout)
    return 0 if report.ok else 1


def _checks(options: argparse.Namespace, system: System) -> Iterator[Check]:
    """What was asked for, in order. Raises LocalError (CONFIG) for arguments that do not fit together."""
    from pdhandoff.cli.checks.addresses import check_addresses, check_listen
    from pdhandoff.cli.checks.finding import Check
    from pdhandoff.cli.checks.movers import Ask, check_mover
    from pdhandoff.cli.checks.peer import PeerAsk, check_peer
    from pdhandoff.cli.checks.settings import check_settings
    from pdhandoff.cli.checks.versions import Torch, check_torch, check_versions, find_torch
    from pdhandoff.engines import registry
    from pdhandoff.runtime.address import parse_address

    if options.option and len(options.mover) != 1:
        raise LocalError(ErrorCode.CONFIG, "--option belongs to one mover: name it by --mover, once")
    for address in filter(None, (options.listen, options.peer)):
        parse_address(address)
    secret = read_secret(options.secret_file)
    within_s, chosen = options.within, dict(options.option)
    torch = Torch(why="was not looked for")

    def look_for_torch() -> list[Finding]:
        nonlocal torch
        torch = find_torch(within_s)
        return [check_torch(torch, system)]

    yield Check("versions", check_versions)
    yield Check("torch", look_for_torch)
    yield Check("settings", lambda: check_settings(system))
    yield Check("addresses", lambda: check_addresses(system))
    if options.listen is not None:
        yield Check(f"listening on {options.listen}", lambda: check_listen(options.listen, system, within_s))

    def probe(name: str) -> Iterator[Finding]:
        return check_mover(Ask(name, bool(options.mover), chosen, within_s, torch))

    for name in options.mover or registry.known():
        yield Check(f"mover {name}: two processes and a page", partial(probe, name))
    if options.peer is not None:
        mover = options.mover[0] if options.mover else None
        yield Check(f"peer {options.peer}", lambda: check_peer(PeerAsk(options.peer, mover, chosen, secret, within_s)))

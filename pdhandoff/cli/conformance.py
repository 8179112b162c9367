"""`pdhandoff conformance`: check a mover, or a running consumer, against the numbered rules."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pdhandoff.cli.conformance_show import Progress, print_json, print_rules
from pdhandoff.cli.options import mover_option, read_secret, seconds
from pdhandoff.cli.tls_options import add_tls_options, read_tls
from pdhandoff.errors import ErrorCode, LocalError

if TYPE_CHECKING:
    import msgspec

    from pdhandoff.ids import HandoffId
    from pdhandoff.testing import Report

    S = TypeVar("S", bound=msgspec.Struct)

__all__ = ["add_parser"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "conformance",
        help="check a mover (transfer engine), or a running consumer, against the numbered rules",
        description="Checks a mover between processes of this machine: what it promises must hold, and what it does "
        "not promise is listed as skipped. With --peer, checks a consumer over the network instead, as its producers. "
        "Exit status 0: something passed and nothing failed.",
    )
    parser.add_argument("--mover", metavar="NAME", help="a registered mover, or module:factory")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=mover_option,
        metavar="KEY=VALUE",
        help="an option of the mover, as JSON where it is JSON and as text otherwise; may be repeated",
    )
    parser.add_argument(
        "--memory",
        choices=("cpu", "cuda"),
        default="cpu",
        help="kind of the memory that a mover is checked in, on both sides, or that rows are written from "
        "(default: %(default)s)",
    )
    parser.add_argument("--device", type=int, default=0, metavar="N", help="CUDA device of it (default: %(default)s)")
    parser.add_argument(
        "--rule", action="append", default=[], metavar="M-07", help="check this rule only; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="print the rules and check nothing")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write the results there as JUnit XML")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, and nothing else")
    _add_sizes(parser)
    _add_peer(parser)
    parser.set_defaults(run=_run)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    sizes = parser.add_argument_group("sizes and patience, for movers")
    sizes.add_argument("--large-bytes", type=_positive, metavar="N", help="bytes of the one large write (64 MiB)")
    sizes.add_argument("--descriptors", type=_positive, metavar="N", help="writes of the one large batch (100000)")
    sizes.add_argument("--threads", type=_positive, metavar="N", help="writers at the same time (8)")
    sizes.add_argument("--death-s", type=float, metavar="S", help="in which a dead peer must be noticed (10)")
    sizes.add_argument("--leaked-threads", type=int, metavar="N", help="that each closed mover may leave behind (0)")
    sizes.add_argument(
        "--leaked-descriptors", type=int, metavar="N", help="that each closed mover may leave behind (0)"
    )


def _add_peer(parser: argparse.ArgumentParser) -> None:
    peer = parser.add_argument_group("a running consumer")
    peer.add_argument("--peer", metavar="HOST:PORT", help="its control address; it should be idle")
    peer.add_argument("--secret-file", type=Path, metavar="PATH", help="holds the secret that it shares")
    add_tls_options(peer)
    peer.add_argument(
        "--handoff",
        action="append",
        default=[],
        metavar="ID",
        help="a handoff that it waits for, in hexadecimal digits; each is used once; may be repeated",
    )
    peer.add_argument(
        "--announce", metavar="COMMAND", help="announces handoffs to it: gets their ids as its last arguments"
    )
    peer.add_argument(
        "--attach",
        action="append",
        type=_attachment,
        metavar="NAME=INTEGER",
        help="goes with every offer, instead of first_token=1 and last_token=1; may be repeated",
    )
    peer.add_argument("--tokens", type=_positive, metavar="N", help="of the prompts that are handed off (100)")
    peer.add_argument("--many", type=_positive, metavar="N", help="offers at the same time (64)")
    peer.add_argument("--queued", type=_positive, metavar="N", help="offers that wait for memory (8)")
    peer.add_argument("--answer-s", type=seconds, metavar="S", help="in which it must answer (10)")
    peer.add_argument("--quiet-s", type=seconds, metavar="S", help="how long to listen for what must not come (0.5)")
    peer.add_argument("--slack-s", type=seconds, metavar="S", help="by which its time-outs may be late (5)")
    peer.add_argument("--handshake-s", type=seconds, metavar="S", help="in which it gives up who says nothing (15)")
    peer.add_argument("--free-s", type=seconds, metavar="S", help="in which all memory is free again (150)")


def _run(options: argparse.Namespace) -> int:
    if not options.json and importlib.util.find_spec("rich") is None:
        raise LocalError(ErrorCode.CONFIG, "the table needs rich: pip install rich, or ask for --json")
    if options.list:
        _list(options)
        return 0
    show = Progress(quiet=options.json)
    report = _check_mover(options, show) if options.peer is None else _check_peer(options, show)
    if options.junit is not None:
        options.junit.write_bytes(report.to_junit())
    if options.json:
        print_json(report)
    else:
        show.end(report)
    return 0 if report.ok else 1


def _list(options: argparse.Namespace) -> None:
    from pdhandoff.testing import ALL_RULES
    from pdhandoff.testing.peers import ALL_PEER_RULES
    from pdhandoff.testing.runner import pick

    every = ALL_PEER_RULES if options.peer is not None else (*ALL_RULES, *ALL_PEER_RULES)
    print_rules(pick(every, options.rule), as_json=options.json)


def _check_mover(options: argparse.Namespace, show: Progress) -> Report:
    from pdhandoff.engines.base import MemoryKind
    from pdhandoff.testing import Sizes
    from pdhandoff.testing.runner import choose, run_conformance

    if options.mover is None:
        from pdhandoff.engines.registry import known

        raise LocalError(
            ErrorCode.CONFIG,
            f"--mover says what to check: {', '.join(known())}, or module:factory of your own; --peer checks a "
            "running consumer",
        )
    choose(options.rule)
    return run_conformance(
        options.mover,
        rules=options.rule,
        options=dict(options.option),
        sizes=_given(options, Sizes),
        memory=MemoryKind(options.memory),
        device=options.device,
        on_result=show.result,
    )


def _check_peer(options: argparse.Namespace, show: Progress) -> Report:
    from pdhandoff.engines.base import MemoryKind
    from pdhandoff.testing.peers import Patience, run_peer_conformance
    from pdhandoff.testing.peers.handoffs import announce_command
    from pdhandoff.testing.peers.runner import ATTACHMENTS

    return run_peer_conformance(
        options.peer,
        rules=options.rule,
        mover=options.mover,
        options=dict(options.option),
        secret=read_secret(options.secret_file),
        tls=read_tls(options),
        handoffs=[_handoff(text) for text in options.handoff],
        announce=None if options.announce is None else announce_command(shlex.split(options.announce)),
        attachments=ATTACHMENTS if options.attach is None else options.attach,
        memory=MemoryKind(options.memory),
        device=options.device,
        patience=_given(options, Patience),
        on_result=show.result,
    )


def _given(options: argparse.Namespace, kind: type[S]) -> S:
    """Sizes as the options say, and as they are by default."""
    given = {name: getattr(options, name) for name in kind.__struct_fields__ if hasattr(options, name)}
    return kind(**{name: value for name, value in given.items() if value is not None})


def _handoff(text: str) -> HandoffId:
    from pdhandoff.ids import HandoffId

    try:
        return HandoffId.parse(text)
    except ValueError as error:
        raise LocalError(ErrorCode.CONFIG, f"--handoff {text}: {error}") from error


def _attachment(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    try:
        number = int(value)
    except ValueError:
        name = ""
    if not name or not -(1 << 63) <= number < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is no attachment such as first_token=42")
    return name, number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number

"""`pdhandoff serve-decode`: a decode node. Nothing heavy is imported before it runs."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from pdhandoff.cli.options import byte_count, mover_option, read_secret, seconds
from pdhandoff.cli.tls_options import add_tls_options, read_tls
from pdhandoff.errors import ErrorCode, LocalError

if TYPE_CHECKING:
    from pdhandoff_tilert.node.serve import HttpSettings
    from pdhandoff_tilert.node.service import NodeSettings

__all__ = ["add_parser"]

_MOST = 1024
"requests that may wait: each has a thread"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "serve-decode",
        help="serve tokens from handoffs that land in a live decode engine",
        description="Takes handoffs into the memory of one decode engine and answers /inference/v1/generate: tokens "
        "in, tokens out. SIGTERM drains; Ctrl-C ends at once. Exit status 0: everything that was taken was answered.",
    )
    _add_engine(parser.add_argument_group("engine"))
    _add_http(parser.add_argument_group("HTTP"))
    _add_handoffs(parser.add_argument_group("handoffs"))
    _add_requests(parser.add_argument_group("requests"))
    parser.set_defaults(run=_run)


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--engine", default="demo", metavar="NAME", help="demo, tilert, or module:factory (default: %(default)s)"
    )
    group.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        type=mover_option,
        metavar="KEY=VALUE",
        help="a keyword argument of the engine's factory; the value is JSON, or text; may be repeated",
    )
    group.add_argument(
        "--park", type=_count, default=1, metavar="N", help="requests that wait converted (default: %(default)s)"
    )


def _add_http(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address, ::1 for IPv6, '' for all (default: %(default)s)")
    group.add_argument("--port", type=_port, default=5557, help="0: any, which is printed (default: %(default)s)")
    group.add_argument("--http-certificate", type=Path, metavar="PATH", help="PEM; with it, HTTPS is spoken")
    group.add_argument("--http-key", type=Path, metavar="PATH", help="its private key")
    group.add_argument("--api-key-file", type=Path, metavar="PATH", help="holds the key that clients have to send")
    group.add_argument(
        "--ready-file",
        type=Path,
        metavar="PATH",
        help="gets addresses as JSON while requests are taken",
    )
    group.add_argument("--log-json", action="store_true", help="log JSON objects, one a line")


def _add_handoffs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--listen", default="127.0.0.1:5556", metavar="HOST:PORT", help="control address (default: %(default)s)"
    )
    group.add_argument(
        "--advertise", metavar="HOST:PORT", help="control address as producers reach it (default: that of --listen)"
    )
    group.add_argument("--mover", default="loopback", metavar="NAME", help="transfer engine (default: %(default)s)")
    group.add_argument(
        "--mover-option", action="append", default=[], type=mover_option, metavar="KEY=VALUE", help="an option of it"
    )
    group.add_argument(
        "--arena-bytes",
        type=byte_count,
        default=byte_count("1G"),
        metavar="BYTES",
        help="landing memory in all, such as 512M or 16G (default: 1G)",
    )
    group.add_argument(
        "--arena-memory", choices=("cpu", "cuda"), default="cpu", help="where it lies (default: %(default)s)"
    )
    group.add_argument("--secret-file", type=Path, metavar="PATH", help="holds the secret that producers share")
    add_tls_options(group)
    group.add_argument(
        "--allow", action="append", metavar="NETWORK", help="address or network of producers; repeatable (default: any)"
    )
    group.add_argument(
        "--unannounced",
        choices=("accept", "wait", "refuse"),
        default="accept",
        help="handoffs that come before their request: take them, for --ready seconds; give the request two seconds to "
        "come; or refuse them (default: %(default)s)",
    )


def _add_requests(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-queue", type=_count, default=32, metavar="N", help="requests that may wait (default: %(default)s)"
    )
    for name, default, text in (
        ("announce", 300.0, "how long a request waits for its producer's offer, unless it says how long"),
        ("ready", 60.0, "how long a complete handoff waits for its request"),
        ("deadline", 1800.0, "how long a request may take in all; it may ask for less"),
        ("stall", 120.0, "an engine that is in one call for longer turns /health red"),
        ("drain", 60.0, "how long requests under way may take after SIGTERM"),
    ):
        group.add_argument(
            f"--{name}", type=seconds, default=default, metavar="SECONDS", help=f"{text} (default: %(default)g)"
        )


def _run(options: argparse.Namespace) -> int:
    for package in ("prometheus_client", "starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise LocalError(ErrorCode.CONFIG, f"a decode node needs {package}: pip install 'pdhandoff[node]'")
    from pdhandoff_tilert.node.engines import find_engine
    from pdhandoff_tilert.node.logs import set_up_logs
    from pdhandoff_tilert.node.serve import serve

    node, http = _node_settings(options), _http_settings(options)
    set_up_logs(json=options.log_json)
    engine = find_engine(options.engine, dict(options.engine_arg))
    return serve(engine, node, http, say=lambda text: print(text, flush=True))  # noqa: T201 - a command line prints


def _node_settings(options: argparse.Namespace) -> NodeSettings:
    from pdhandoff.engines.base import MemoryKind
    from pdhandoff.protocol.consumer import Unannounced
    from pdhandoff.runtime.address import parse_address
    from pdhandoff_tilert.node.service import NodeSettings

    for address in filter(None, (options.listen, options.advertise)):
        parse_address(address)
    return NodeSettings(
        mover=options.mover,
        mover_options=dict(options.mover_option),
        arena_bytes=options.arena_bytes,
        memory=MemoryKind(options.arena_memory),
        listen=options.listen,
        advertise=options.advertise,
        secret=read_secret(options.secret_file),
        tls=read_tls(options),
        allow=None if options.allow is None else tuple(options.allow),
        unannounced=Unannounced(options.unannounced),
        max_queue=options.max_queue,
        parking=options.park,
        announce_s=options.announce,
        ready_s=options.ready,
        request_s=options.deadline,
        stall_s=options.stall,
    )


def _http_settings(options: argparse.Namespace) -> HttpSettings:
    from pdhandoff.runtime.address import Address
    from pdhandoff_tilert.node.serve import HttpSettings

    if (options.http_certificate is None) is not (options.http_key is None):
        raise LocalError(ErrorCode.CONFIG, "--http-certificate and --http-key belong together: give both, or neither")
    for path in filter(None, (options.http_certificate, options.http_key)):
        if not path.is_file():
            raise LocalError(ErrorCode.CONFIG, f"there is no file {path}")
    return HttpSettings(
        address=Address(options.host.removeprefix("[").removesuffix("]"), options.port),
        certificate=options.http_certificate,
        key=options.http_key,
        api_key=read_secret(options.api_key_file),
        drain_s=options.drain,
        ready_file=options.ready_file,
        connections=max(1024, 2 * options.max_queue),
    )


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= _MOST):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {_MOST}")
    return int(text)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is no port from 0 to 65535")
    return int(text)

"""`pdhandoff router`. Nothing heavy is imported before it runs."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
from pathlib import Path
from typing import Final

from pdhandoff.cli.options import seconds
from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["add_parser", "need"]

_NEEDED: Final = ("httpx", "prometheus_client", "starlette", "uvicorn")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "router",
        help="answer OpenAI's and Anthropic's API from vLLM's prefill and a pool of decode nodes",
        description="Renders a request through vLLM, has vLLM prefill it, a decode node decode it, and vLLM turn "
        "tokens into text. SIGTERM drains, SIGHUP reads the configuration again, Ctrl-C ends at once.",
    )
    servers = parser.add_argument_group("servers (in place of a configuration file)")
    servers.add_argument("--prefill", action="append", default=[], metavar="URL", help="vLLM with the connector")
    servers.add_argument("--decode", action="append", default=[], metavar="URL", help="a pdhandoff serve-decode")
    servers.add_argument("--native", action="append", default=[], metavar="URL", help="vLLM that answers by itself")
    servers.add_argument("--render-url", metavar="URL", help="a `vllm launch render`; else the first --prefill")
    servers.add_argument(
        "--on-failure",
        choices=("fail", "retry", "native"),
        default="retry",
        help="when a handoff fails before its first token (default: %(default)s)",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML; read again when it changes")
    parser.add_argument("--host", default="127.0.0.1", help="address, '' for all (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=23333, help="0: any, which is printed (default: %(default)s)")
    parser.add_argument("--ready-file", type=Path, metavar="PATH", help="gets the address as JSON while it serves")
    parser.add_argument(
        "--drain", type=seconds, default=60.0, metavar="SECONDS", help="after SIGTERM (default: %(default)s)"
    )
    parser.set_defaults(run=_run)


def need(command: str, modules: tuple[str, ...], extra: str) -> None:
    """See that packages are there. Raises LocalError that says what to install."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise LocalError(ErrorCode.CONFIG, f"{command} needs {', '.join(missing)}: pip install 'pdhandoff[{extra}]'")


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 to 65535")
    return int(text)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _run(options: argparse.Namespace) -> int:
    need("pdhandoff router", _NEEDED, "router")
    from pdhandoff.runtime.address import Address
    from pdhandoff_router.config import Config, DecodeNode, NativeServer, OnFailure, Pool, read_config, with_defaults
    from pdhandoff_router.serve import serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    named = options.prefill or options.decode or options.native or options.render_url
    if options.config is not None and named:
        raise LocalError(ErrorCode.CONFIG, "name servers in --config or by options, not both")
    if options.config is not None:
        config = read_config(options.config)
    else:
        handoffs = bool(options.prefill and options.decode)
        config = with_defaults(
            Config(
                prefill=options.prefill,
                decode=[DecodeNode(url=url) for url in options.decode],
                native=[NativeServer(url=url) for url in options.native],
                render=options.render_url,
                pool=Pool.HANDOFF if handoffs or not options.native else Pool.NATIVE,
                on_failure=OnFailure(options.on_failure),
            )
        )
    return serve(
        config,
        file=options.config,
        address=Address(options.host, options.port),
        ready_file=options.ready_file,
        drain_s=options.drain,
        say=_say,
    )

"""`pdhandoff top`: how decode nodes stand, again and again."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pdhandoff.cli.options import read_secret, seconds
from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff_router.command import need

if TYPE_CHECKING:
    from rich.table import Table

    from pdhandoff_router.transport import Transport

__all__ = ["add_parser", "status_table"]

_WITHIN_S: Final = 3.0
_MOST_NODES: Final = 256
_MOST_FAILURES: Final = 8
_MIB: Final = 1 << 20


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "top",
        help="show decode nodes, their line, landing memory and last failures, live",
        description="Asks every decode node for its status and shows all of them in a table. Ctrl-C ends it.",
    )
    parser.add_argument("urls", nargs="+", metavar="URL", help="of a decode node, or of a router that knows some")
    parser.add_argument("--every", type=seconds, default=1.0, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--once", action="store_true", help="show it once; exit status 1 where a node is not serving")
    parser.add_argument("--api-key-file", type=Path, metavar="PATH", help="holds the nodes' API key")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    need("pdhandoff top", ("httpx", "rich"), "router")
    for url in options.urls:
        if not url.startswith(("http://", "https://")):
            raise LocalError(ErrorCode.CONFIG, f"{url!r} is no URL such as http://127.0.0.1:5557")
    key = read_secret(options.api_key_file)
    headers = {} if key is None else {"authorization": f"Bearer {key.decode('latin-1')}"}
    with contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(_watch(options.urls, headers, options.every, once=options.once))
    return 0


async def _watch(urls: list[str], headers: dict[str, str], every_s: float, *, once: bool) -> int:
    from rich.console import Console, Group
    from rich.live import Live

    from pdhandoff_router.transport import Transport

    transport, console = Transport(), Console()
    try:
        found = await _ask_all(transport, urls, headers)
        if once:
            console.print(*_tables(found))
            return 0 if all(status.get("state") == "serving" for _, status in found) else 1
        with Live(Group(*_tables(found)), console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                live.update(Group(*_tables(found)), refresh=True)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(every_s):
                        await asyncio.Event().wait()
                found = await _ask_all(transport, urls, headers)
    finally:
        await transport.close()


async def _ask_all(transport: Transport, urls: list[str], headers: dict[str, str]) -> list[tuple[str, dict[str, Any]]]:
    """(URL, status page) of every node; a router stands for the nodes that it knows."""
    first = await asyncio.gather(*(_ask(transport, url.rstrip("/"), headers) for url in urls))
    known = [node["url"] for _, status in first for node in status.get("decode", ())]
    more = await asyncio.gather(*(_ask(transport, url, headers) for url in dict.fromkeys(known[:_MOST_NODES])))
    return [pair for pair in first if "decode" not in pair[1]] + list(more)


async def _ask(transport: Transport, url: str, headers: dict[str, str]) -> tuple[str, dict[str, Any]]:
    from pdhandoff_router.refusals import Refusal, from_answer
    from pdhandoff_router.transport import read_json

    try:
        answer = await transport.ask(f"{url}/status", who=url, within_s=_WITHIN_S, headers=headers)
        if answer.status != 200:
            raise from_answer(answer.status, answer.body, who=url)
        status = read_json(answer.body, url)
    except Refusal as refusal:
        return url, {"state": "silent", "reason": refusal.reason}
    return url, status if isinstance(status, dict) else {"state": "silent", "reason": "it gave no status page"}


def _tables(found: list[tuple[str, dict[str, Any]]]) -> list[Table]:
    failures = [
        (url, failure) for url, status in found for failure in status.get("recent_failures", ()) if "ago_s" in failure
    ]
    failures.sort(key=lambda pair: float(pair[1]["ago_s"]))
    return [status_table(found), *([_failure_table(failures[:_MOST_FAILURES])] if failures else [])]


def status_table(found: list[tuple[str, dict[str, Any]]]) -> Table:
    """One row for each node.

    Args:
        found: (URL, status page), as `/status` gives it.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for name in ("node", "state", "decodes", "waits", "landing MiB", "handoffs", "ready", "failed"):
        table.add_column(name, no_wrap=name in {"node", "state", "landing MiB"})
    reasons: list[str] = []
    for url, status in found:
        running, landing = status.get("running"), status.get("landing") or {}
        state = str(status.get("state"))
        colour = {"serving": "green", "draining": "yellow"}.get(state, "red")
        if status.get("reason"):
            reasons.append(f"{url.partition('://')[2]}: {status['reason']}")
        decodes = "" if running is None else f"{running.get('output_tokens')}/{running.get('max_tokens')} tokens"
        total, free = landing.get("total_bytes", 0), landing.get("free_bytes", 0)
        states = ", ".join(f"{count} {name}" for name, count in landing.get("states", {}).items() if count)
        table.add_row(
            escape(url.partition("://")[2]),
            f"[{colour}]{escape(state)}[/]",
            decodes,
            f"{status.get('queued', '')}/{status.get('max_queue', '')}",
            f"{(total - free) / _MIB:.1f}/{total / _MIB:.0f}",
            escape(states),
            str(landing.get("ready", "")),
            str(sum(landing.get("failed", {}).values())),
        )
    table.caption = escape("\n".join(reasons)) or None
    return table


def _failure_table(failures: list[tuple[str, dict[str, Any]]]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table("ago", "node", "request", "status", "code", "reason", title="last failures")
    for url, failure in failures:
        fields = (failure.get("request_id"), failure.get("status"), failure.get("code"), failure.get("reason"))
        table.add_row(
            f"{float(failure['ago_s']):.0f} s", escape(url.partition("://")[2]), *(escape(str(each)) for each in fields)
        )
    return table

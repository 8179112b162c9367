"""The native pool: vLLM answers by itself, or by its own two-leg flow, and the router passes pieces on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from pdhandoff_router.client import Client
from pdhandoff_router.refusals import Refusal, from_answer
from pdhandoff_router.servers import Server, Servers
from pdhandoff_router.transport import Transport, read_json

__all__ = ["answer_natively", "one_token"]

_NATIVE_MARK: Final[Mapping[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"vLLM's NixlConnector, as its own proxies mark the prefill leg"
_BUDGETS: Final[Mapping[str, tuple[str, ...]]] = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/messages": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}
_NOT_YET: Final = frozenset({"min_tokens", "n", "best_of", "stop", "stop_sequences", "stream", "stream_options"})
"belong to the decode leg"


async def answer_natively(
    client: Client,
    transport: Transport,
    servers: Servers,
    *,
    path: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    prefill_s: float,
    within_s: float,
) -> int:
    """Let a native server answer.

    Args:
        client: gets the answer as it is.
        transport: the way to the servers.
        servers: the pool.
        path: that the client asked.
        body: the client's, without transfer parameters.
        headers: go with both legs.
        prefill_s: bound on a prefill leg.
        within_s: bound on all of it.

    Returns:
        The status that the client got.

    Raises:
        Refusal: no server answered.
    """
    with servers.lease() as server:
        who = f"the native server {server.name}"
        try:
            async with asyncio.timeout(within_s):
                asked = await _prefilled(transport, server, path=path, body=body, headers=headers, within_s=prefill_s)
                async with transport.open(server.url + path, who=who, body=asked, headers=headers) as answer:
                    kind = answer.headers.get("content-type", "application/json")
                    await client.start(answer.status, kind)
                    async for piece in answer.pieces():
                        await client.write(piece)
                    await client.finish()
                    return answer.status
        except TimeoutError:
            raise Refusal(504, f"{who} was not done within {within_s:.3g} s", code="TIMEOUT") from None
        except Refusal as refusal:
            if refusal.code == "UNREACHABLE":
                server.problem = refusal.reason
            raise


async def _prefilled(
    transport: Transport,
    server: Server,
    *,
    path: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    within_s: float,
) -> Mapping[str, Any]:
    """The body for the server that answers: after a prefill leg, where it has a server for that."""
    if server.prefill is None:
        return body
    who = f"the prefill server {server.prefill.partition('://')[2]}"
    asked = {**one_token(path, body), "kv_transfer_params": dict(_NATIVE_MARK)}
    answer = await transport.ask(server.prefill + path, who=who, within_s=within_s, body=asked, headers=headers)
    if answer.status != 200:
        raise from_answer(answer.status, answer.body, who=who, retry_after=answer.headers.get("retry-after"))
    found = read_json(answer.body, who)
    params = found.get("kv_transfer_params") if isinstance(found, dict) else None
    return {**body, "kv_transfer_params": params} if isinstance(params, dict) else body


def one_token(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """A client's request, cut down to its first token: every way to say a budget says one."""
    kept = {key: value for key, value in body.items() if key not in _NOT_YET}
    budgets = _BUDGETS[path]
    return {**kept, **{name: 1 for name in budgets if name in body or name == budgets[0]}}

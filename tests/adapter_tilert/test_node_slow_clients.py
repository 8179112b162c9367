"""Clients that open a connection and take their time: every wait of the node has an end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from starlette.types import Message

from pdhandoff_tilert.node import app as node_app
from pdhandoff_tilert.node import protocol
from pdhandoff_tilert.node.job import Ending, Tokens
from pdhandoff_tilert.node.mailbox import Mailbox
from pdhandoff_tilert.node.refusals import Refusal

HEAD = b"GET / HTTP/1.1\r\nhost: x\r\n"
WITHIN_S = 20.0


async def hello(_scope: Any, _receive: Any, send: Callable[[Message], Any]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


async def talk(*pieces: bytes) -> bytes:
    """What a server says to a client that sends these and then waits for the end of the connection."""
    config = uvicorn.Config(hello, http=protocol.BoundedH11, ws="none", lifespan="off", log_config=None)
    config.load()
    state = uvicorn.server.ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: protocol.BoundedH11(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    async with server, asyncio.timeout(WITHIN_S):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        answer = b""
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            if piece.endswith(b"\r\n\r\n"):
                answer += await reader.readuntil(b"hi")
        answer += await reader.read()
        writer.close()
        return answer


@pytest.mark.parametrize(
    ("pieces", "answers"),
    [
        ((), 0),
        ((b"GET",), 0),
        ((HEAD,), 0),
        ((HEAD + b"\r\n", HEAD), 1),
        ((HEAD + b"\r\n", HEAD + b"\r\n", b"G"), 2),
    ],
)
def test_a_head_that_does_not_end_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch, pieces: tuple[bytes, ...], answers: int
) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.05)
    assert asyncio.run(talk(*pieces)).count(b"HTTP/1.1 200") == answers


def test_a_body_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_app, "BODY_S", 0.05)

    async def receive() -> Message:
        if started:
            await asyncio.Event().wait()
        started.append(True)
        return {"type": "http.request", "body": b"{", "more_body": True}

    started: list[bool] = []
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)
    with pytest.raises(Refusal) as caught:
        asyncio.run(node_app.read_body(request, 100))
    assert caught.value.status == 408


def test_a_mailbox_keeps_order_and_what_belongs_together() -> None:
    async def scene() -> list[list[object]]:
        mailbox = Mailbox()
        tokens, ending = Tokens(tokens=(1,)), Ending(finish_reason="stop")
        with pytest.raises(TimeoutError):
            await mailbox.take(0.01)
        await asyncio.to_thread(mailbox.put, (tokens,))
        first = await mailbox.take(WITHIN_S)
        mailbox.put((tokens, ending))
        mailbox.put((tokens,))
        return [list(first), list(await mailbox.take(WITHIN_S))]

    one, three = asyncio.run(scene())
    assert (len(one), [type(each) for each in three]) == (1, [Tokens, Ending, Tokens])

"""Small stand-ins for a vLLM server and a decode node, in this process: they keep what they were asked."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any, Final, Self

import httpx
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pdhandoff.runtime.address import Address, listen
from pdhandoff_router.app import make_app
from pdhandoff_router.config import Config, DecodeNode, with_defaults
from pdhandoff_router.router import Router
from support.engines import until

__all__ = ["FakeNode", "FakeVllm", "Served", "Stack", "data_of"]

FIRST: Final = 1000
"what prefill samples; decoding goes on by counting up"
_PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


class Served:
    """An ASGI application on a thread and a loop of its own. A context manager."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.after: Callable[[], Any] = _nothing
        "runs on the loop when the application has ended"
        self._started = threading.Event()
        self._sock = listen(Address("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread.is_alive():
            with suppress(RuntimeError):  # its loop has just been closed
                self._loop.call_soon_threadsafe(self.end_soon)
        self._thread.join(10)
        self._sock.close()
        assert not self._thread.is_alive()

    def call(self, function: Callable[[], Any]) -> None:
        """Run something on its loop, soon."""
        self._loop.call_soon_threadsafe(function)

    def end_soon(self) -> None:
        """End it; on its own loop."""
        self._server.should_exit = True

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        made = self._make()
        app = await made if asyncio.iscoroutine(made) else made
        config = uvicorn.Config(
            app, http="h11", ws="none", lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
        )
        self._server = _Server(config)
        task = asyncio.create_task(self._server.serve(sockets=[self._sock]))
        while not self._server.started and not task.done():
            await asyncio.wait([task], timeout=0.005)
        self._started.set()
        await task
        await self.after()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class FakeVllm(Served):
    """Renders "abc" as [97, 98, 99], prefills FIRST, and derenders token t as the letter t - FIRST after a."""

    def __init__(self) -> None:
        super().__init__(self._app)
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.prefill: Callable[[dict[str, Any]], Response | None] = lambda _body: None
        "answers a prefill leg in place of the usual answer"
        self.scale_out = True
        self.hold = threading.Event()
        "prefill waits until this is set"
        self.hold.set()
        self.gone = 0
        "prefill legs whose client left"
        self.marked: Callable[[str], None] = lambda _handoff: None
        self.finish = "length"

    def of(self, path: str) -> list[dict[str, Any]]:
        """Bodies that came to a path."""
        return [body for where, body, _ in self.asked if where == path]

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                *(Route(f"{path}/render", self._render, methods=["POST"]) for path in _PATHS),
                *(Route(f"{path}/derender", self._derender, methods=["POST"]) for path in _PATHS[:2]),
                *(Route(path, self._native, methods=["POST"]) for path in _PATHS),
                Route("/inference/v1/generate", self._generate, methods=["POST"]),
                Route("/health", lambda _request: Response(), methods=["GET"]),
                Route("/v1/models", lambda _request: JSONResponse({"data": [{"id": "m"}]}), methods=["GET"]),
            ]
        )

    async def _note(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = await request.json()
        self.asked.append((request.url.path, body, dict(request.headers)))
        return body

    async def _render(self, request: Request) -> Response:
        body = await self._note(request)
        if not self.scale_out:
            return JSONResponse({"error": {"message": "use --enable-scale-out", "code": 403}}, 403)
        if body.get("model") != "m":
            return JSONResponse({"error": {"message": "no such model", "type": "NotFoundError", "code": 404}}, 404)
        text = body.get("prompt") or body.get("input") or body["messages"][0]["content"]
        default = 16 if request.url.path.startswith("/v1/completions") else 400
        budgets = [body.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens")]
        most = next((each for each in budgets if each), default)
        sampling: dict[str, Any] = {
            "max_tokens": most,
            "temperature": 0,
            "stop": body.get("stop") or [],
            "n": body.get("n") or 1,
        }
        sampling["min_tokens"] = body.get("min_tokens") or 0
        sampling["logprobs"] = 1 if body.get("logprobs") else None
        defaults = {"max_tokens": 16, "temperature": 1.0, "stop": [], "n": 1, "min_tokens": 0, "logprobs": None}
        # as vLLM does: what is SamplingParams' default is left out
        sampling = {name: value for name, value in sampling.items() if value != defaults[name]}
        rendered: dict[str, Any] = {
            "request_id": "req-1",
            "token_ids": list(text.encode()),
            "sampling_params": sampling,
        }
        rendered["kv_transfer_params"] = body.get("kv_transfer_params")
        single = not request.url.path.startswith("/v1/completions")
        return JSONResponse(rendered if single else [rendered])

    async def _generate(self, request: Request) -> Response:
        body = await self._note(request)
        answer = self.prefill(body)
        if answer is not None:
            return answer
        while not self.hold.is_set():
            if await request.is_disconnected():
                self.gone += 1
                return Response()
            await asyncio.wait([asyncio.create_task(_tick())])
        params = body.get("kv_transfer_params")
        if params is not None:
            self.marked(params["pdhandoff"]["handoff"])
            params = {"pdhandoff": {**params["pdhandoff"], "status": "sent", "reason": "", "first_token": FIRST}}
        choice = {"index": 0, "token_ids": [FIRST], "finish_reason": "length"}
        return JSONResponse({"choices": [choice], "kv_transfer_params": params})

    async def _derender(self, request: Request) -> Response:
        body = await self._note(request)
        chat = "chat" in request.url.path
        if body["stream"]:
            choice = body["generate_chunk"]["choices"][0]
            text = _text(choice["token_ids"])
            said = {"delta": {"role": "assistant", "content": text}} if chat else {"text": text}
            made = {"index": 0, "finish_reason": choice["finish_reason"], **said}
            state = {"n": (body["stream_state"] or {"n": 0})["n"] + len(choice["token_ids"])}
            return JSONResponse({"chunk": _object(made), "stream_state": state})
        generated = body["generate_response"] if chat else body["generate_responses"][0]
        choice = generated["choices"][0]
        text = _text(choice["token_ids"])
        said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        made = {"index": 0, "finish_reason": choice["finish_reason"], "logprobs": choice["logprobs"], **said}
        return JSONResponse({**_object(made), "usage": {"prompt_tokens": 0, "completion_tokens": 0}})

    async def _native(self, request: Request) -> Response:
        body = await self._note(request)
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            return JSONResponse({"kv_transfer_params": {"do_remote_prefill": True, "remote_port": 7}})
        return JSONResponse({"native": True, "choices": []})


class FakeNode(Served):
    """Decodes a handoff once `land` has named it: FIRST, FIRST + 1, ..."""

    def __init__(self) -> None:
        super().__init__(self._app)
        self.asked: list[dict[str, Any]] = []
        self.landed: set[str] = set()
        self.answer: Callable[[dict[str, Any]], Response | None] = lambda _body: None
        "answers in place of the usual answer"
        self.status: dict[str, Any] = {
            "state": "serving",
            "reason": "",
            "control": "127.0.0.1:5556",
            "max_seq_len": 100,
            "parking": 1,
            "max_queue": 8,
            "layout_digest": "d",
        }
        self.most: int | None = None
        "tokens before the stream is held, or broken where `breaks` is true"
        self.breaks = False
        self.present = 0
        self.ended: list[str] = []

    def land(self, handoff: str) -> None:
        """A handoff has landed."""
        self.landed.add(handoff)

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/inference/v1/generate", self._generate, methods=["POST"]),
                Route("/status", lambda _request: JSONResponse(self.status), methods=["GET"]),
            ]
        )

    async def _generate(self, request: Request) -> Response:
        body: dict[str, Any] = await request.json()
        self.asked.append(body)
        answer = self.answer(body)
        if answer is not None:
            return answer
        handoff = body["kv_transfer_params"]["pdhandoff"]["handoff"]
        self.present += 1
        try:
            while handoff not in self.landed:
                if await request.is_disconnected():
                    self.ended.append(handoff)
                    return Response()
                await asyncio.wait([asyncio.create_task(_tick())])
        finally:
            self.present -= 1
        return StreamingResponse(self._stream(request, body, handoff), media_type="text/event-stream")

    async def _stream(self, request: Request, body: dict[str, Any], handoff: str) -> AsyncIterator[bytes]:
        self.present += 1
        try:
            count = body["sampling_params"]["max_tokens"]
            for place in range(count):
                if place == self.most:
                    if self.breaks:
                        yield b'data: {"error": {"message": "the engine broke", "code": 500}}\n\ndata: [DONE]\n\n'
                        return
                    while not await request.is_disconnected():
                        await asyncio.wait([asyncio.create_task(_tick())])
                    return
                finish = "length" if place == count - 1 else None
                choice = {"index": 0, "token_ids": [FIRST + place], "finish_reason": finish}
                yield b"data: " + json.dumps({"request_id": "x", "choices": [choice]}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            self.present -= 1
            self.ended.append(handoff)


async def _nothing() -> None:
    return None


async def _tick() -> None:
    loop = asyncio.get_running_loop()
    later: asyncio.Future[None] = loop.create_future()
    loop.call_later(0.005, later.set_result, None)
    await later


class Stack:
    """A router with one fake vLLM server and some fake decode nodes. A context manager."""

    def __init__(
        self, nodes: int = 1, *, native: bool = False, decode_credits: int | None = None, **config: Any
    ) -> None:
        self.vllm = FakeVllm()
        self.natives = FakeVllm()
        self.nodes = [FakeNode() for _ in range(nodes)]
        self._native = native
        self._credits = decode_credits
        self._config = config
        self.expected: list[int] = []
        "for tests that hand off for real"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for server in (self.vllm, self.natives, *self.nodes):
            self._stack.enter_context(server)
        for node in self.nodes:
            former = self.vllm.marked

            def both(handoff: str, node: FakeNode = node, former: Callable[[str], None] = former) -> None:
                former(handoff)
                node.land(handoff)

            self.vllm.marked = both
        settings: dict[str, Any] = {
            "prefill": [self.vllm.url],
            "decode": [DecodeNode(url=node.url, credits=self._credits) for node in self.nodes],
            "probe_s": 0.05,
        }
        if self._native:
            settings["native"] = [{"url": self.natives.url}]
        config = with_defaults(msgspec.convert({**msgspec.to_builtins(settings), **self._config}, Config))

        async def make() -> Any:
            self.router = Router(config, file=None, clock=asyncio.get_running_loop().time)
            await self.router.look()
            self._watching = asyncio.create_task(self.router.run())
            return make_app(self.router)

        async def after() -> None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            await self.router.transport.close()

        self.served = self._stack.enter_context(Served(make))
        self.served.after = after
        self.client = self._stack.enter_context(httpx.Client(base_url=self.served.url, timeout=20.0, trust_env=False))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in (self.served, self.vllm, self.natives, *self.nodes):  # together, for that takes a while
            server.call(server.end_soon)
        self._stack.close()

    def chat(self, **more: Any) -> httpx.Response:
        """A chat request of three prompt tokens and four output tokens."""
        return self.client.post("/v1/chat/completions", json=chat_body(**more))

    def idle(self) -> None:
        """Wait until nobody holds anything: no request, no credit, nothing on a node."""
        until(
            lambda: (
                self.router.present == 0
                and all(node.held == 0 for node in self.router.pool.nodes.values())
                and all(node.present == 0 for node in self.nodes)
            ),
            "everything is free again",
        )


def chat_body(**more: Any) -> dict[str, Any]:
    """The body of that request."""
    return {"model": "m", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 4, **more}


def data_of(text: str) -> list[Any]:
    """What a stream of events brought, without its end."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _text(tokens: list[int]) -> str:
    return "".join(chr(ord("a") + token - FIRST) for token in tokens)


def _object(choice: dict[str, Any]) -> dict[str, Any]:
    return {"id": "req-1", "object": "o", "created": 1, "model": "m", "choices": [choice], "usage": None}

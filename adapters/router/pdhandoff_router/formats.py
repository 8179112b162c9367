"""OpenAI's two completion formats: what vLLM's derender gives is what the client gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol, final

import msgspec

from pdhandoff_router.refusals import Refusal

__all__ = ["CHAT", "COMPLETIONS", "DONE", "ChatFormat", "Format", "Usage", "event"]

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
DONE: Final = b"data: [DONE]\n\n"


@final
class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request, each counted once."""

    prompt_tokens: int
    completion_tokens: int

    def openai(self) -> dict[str, int]:
        """In OpenAI's words."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class Format(Protocol):
    """How one request's answer is said."""

    path: str
    "which of vLLM's derender endpoints makes its text"

    def asked(self) -> object:
        """Output tokens that the client asked for; None: it did not say."""
        ...

    def context(self) -> dict[str, Any]:
        """The client's request, as derendering wants to see it."""
        ...

    def chunk(self, made: dict[str, Any], usage: Usage) -> bytes:
        """Events for a derendered chunk."""
        ...

    def end(self, usage: Usage) -> bytes:
        """Events after the last chunk."""
        ...

    def whole(self, made: dict[str, Any], usage: Usage) -> dict[str, Any]:
        """The answer in one piece, for a derendered one."""
        ...

    def failed(self, refusal: Refusal) -> bytes:
        """Events that end a stream that cannot go on."""
        ...

    def refused(self, refusal: Refusal) -> dict[str, Any]:
        """The body of an answer that is none."""
        ...


@final
class ChatFormat:
    """/v1/chat/completions and /v1/completions.

    Args:
        path: one of these.
        body: the client's.
    """

    def __init__(self, path: str, body: Mapping[str, Any]) -> None:
        self.path = path
        self._body = body
        options = body.get("stream_options")
        self._options: Mapping[str, Any] = options if isinstance(options, dict) else {}
        self._last: dict[str, Any] = {}

    def asked(self) -> object:
        """Output tokens that the client asked for; None: it did not say."""
        newer = self._body.get("max_completion_tokens") if self.path == CHAT else None
        return self._body.get("max_tokens") if newer is None else newer

    def context(self) -> dict[str, Any]:
        """The client's request, as derendering wants to see it."""
        return {"chat_request" if self.path == CHAT else "completion_request": self._body}

    def chunk(self, made: dict[str, Any], usage: Usage) -> bytes:
        """Events for a derendered chunk."""
        self._last = made
        always = self._options.get("include_usage") and self._options.get("continuous_usage_stats")
        return event({**made, "usage": usage.openai() if always else None})

    def end(self, usage: Usage) -> bytes:
        """Events after the last chunk: usage where it was asked for."""
        tail = b""
        if self._options.get("include_usage"):
            tail = event({**self._last, "choices": [], "usage": usage.openai()})
        return tail + DONE

    def whole(self, made: dict[str, Any], usage: Usage) -> dict[str, Any]:
        """The answer in one piece."""
        return {**made, "usage": {**(made.get("usage") or {}), **usage.openai()}}

    def failed(self, refusal: Refusal) -> bytes:
        """Events that end a stream that cannot go on."""
        return event(refusal.openai()) + DONE

    def refused(self, refusal: Refusal) -> dict[str, Any]:
        """The body of an answer that is none."""
        return refusal.openai()


def event(body: object) -> bytes:
    """One server-sent event without a name."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"

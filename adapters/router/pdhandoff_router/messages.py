"""Anthropic's /v1/messages, from vLLM's derendered chat.

Source: the events and fields of the Messages API, as vLLM 0.32 gives them, vllm/entrypoints/anthropic/serving.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

import msgspec

from pdhandoff_router.formats import CHAT, Usage
from pdhandoff_router.pieces import Kind, Piece, chat_tools, finish_of, pieces_of
from pdhandoff_router.refusals import Refusal

__all__ = ["MessagesFormat"]

_STOP: Final[Mapping[str | None, str]] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICE: Final[Mapping[str, str]] = {"auto": "auto", "any": "required", "none": "none"}


@final
class MessagesFormat:
    """One request of /v1/messages.

    Args:
        body: the client's.
    """

    path = CHAT

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._id = ""
        self._open: tuple[Kind, int] | None = None
        self._blocks = 0
        self._finish: str | None = None

    def asked(self) -> object:
        """Output tokens that the client asked for."""
        return self._body.get("max_tokens")

    def context(self) -> dict[str, Any]:
        """What vLLM's parsers read of a chat request: tools, and the choice among them."""
        chat: dict[str, Any] = {
            "model": self._body.get("model"),
            "messages": [{"role": "user", "content": ""}],
            "stream": bool(self._body.get("stream")),
        }
        tools = chat_tools(self._body.get("tools"), schema="input_schema")
        if tools:
            chosen = self._body.get("tool_choice")
            choice = chosen if isinstance(chosen, dict) else {}
            named = {"type": "function", "function": {"name": choice.get("name")}}
            kind = choice.get("type", "auto")
            chat |= {"tools": tools, "tool_choice": named if kind == "tool" else _CHOICE.get(kind, "auto")}
        return {"chat_request": chat}

    def chunk(self, made: dict[str, Any], usage: Usage) -> bytes:
        """Events for a derendered chunk."""
        out = b""
        if not self._id:
            self._id = str(made.get("id"))
            message = self._message([], None, Usage(prompt_tokens=usage.prompt_tokens, completion_tokens=0))
            out += _event("message_start", message=message)
        for piece in pieces_of(made):
            out += self._piece(piece)
        self._finish = finish_of(made) or self._finish
        return out

    def _piece(self, piece: Piece) -> bytes:
        out = b""
        if self._open != (piece.kind, piece.index):
            out += self._close()
            self._open = (piece.kind, piece.index)
            out += _event("content_block_start", index=self._blocks, content_block=_block(piece, ""))
        delta = {
            Kind.THINKING: {"type": "thinking_delta", "thinking": piece.text},
            Kind.TEXT: {"type": "text_delta", "text": piece.text},
            Kind.TOOL: {"type": "input_json_delta", "partial_json": piece.text},
        }[piece.kind]
        return out + (_event("content_block_delta", index=self._blocks, delta=delta) if piece.text else b"")

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        self._blocks += 1
        return _event("content_block_stop", index=self._blocks - 1)

    def end(self, usage: Usage) -> bytes:
        """Events after the last chunk."""
        delta = {"stop_reason": _STOP.get(self._finish, "end_turn"), "stop_sequence": None}
        return self._close() + _event("message_delta", delta=delta, usage=_usage(usage)) + _event("message_stop")

    def whole(self, made: dict[str, Any], usage: Usage) -> dict[str, Any]:
        """The answer in one piece."""
        self._id = str(made.get("id"))
        blocks = [_block(piece, piece.text) for piece in pieces_of(made)]
        return self._message(blocks, _STOP.get(finish_of(made), "end_turn"), usage)

    def failed(self, refusal: Refusal) -> bytes:
        """The event that ends a stream that cannot go on."""
        return b"event: error\ndata: " + msgspec.json.encode(refusal.anthropic()) + b"\n\n"

    def refused(self, refusal: Refusal) -> dict[str, Any]:
        """The body of an answer that is none."""
        return refusal.anthropic()

    def _message(self, blocks: list[dict[str, Any]], stop: str | None, usage: Usage) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._body.get("model"),
            "content": blocks,
            "stop_reason": stop,
            "stop_sequence": None,
            "usage": _usage(usage),
        }


def _block(piece: Piece, text: str) -> dict[str, Any]:
    if piece.kind is Kind.TOOL:
        return {"type": "tool_use", "id": piece.call_id, "name": piece.name, "input": _arguments(text)}
    if piece.kind is Kind.THINKING:
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _arguments(text: str) -> Any:
    try:
        return msgspec.json.decode(text) if text else {}
    except msgspec.DecodeError:  # the model wrote it, and may have been cut off
        return {"_raw": text}


def _usage(usage: Usage) -> dict[str, int]:
    return {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}


def _event(name: str, /, **fields: Any) -> bytes:
    return f"event: {name}\ndata: ".encode() + msgspec.json.encode({"type": name, **fields}) + b"\n\n"

"""OpenAI's /v1/responses, from vLLM's derendered chat.

Source: the events and fields of the Responses API, as vLLM 0.32 gives them, vllm/entrypoints/openai/responses/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

import msgspec

from pdhandoff_router.formats import CHAT, Usage
from pdhandoff_router.pieces import Kind, Piece, chat_tools, finish_of, pieces_of
from pdhandoff_router.refusals import Refusal

__all__ = ["ResponsesFormat"]

_PART: Final[Mapping[Kind, tuple[str, str]]] = {
    Kind.TEXT: ("output_text", "output_text"),
    Kind.THINKING: ("reasoning_text", "reasoning_text"),
}
"kind -> the type of its part, and the word in its events"
_MORE: Final[Mapping[Kind, Mapping[str, Any]]] = {Kind.TEXT: {"logprobs": []}, Kind.THINKING: {}}
"what else its events have"


@final
class _Item:
    """One item of the output, as far as it has come."""

    def __init__(self, piece: Piece, number: int, response_id: str) -> None:
        self.kind = piece.kind
        self.index = piece.index
        self.number = number
        self.text = ""
        self.call_id = piece.call_id
        self.name = piece.name
        prefix = {Kind.TEXT: "msg", Kind.THINKING: "rs", Kind.TOOL: "fc"}[piece.kind]
        self.id = f"{prefix}_{number}_{response_id}"

    def part(self) -> dict[str, Any]:
        """Its one part."""
        kind = _PART[self.kind][0]
        return {"type": kind, "text": self.text, **({"annotations": []} if self.kind is Kind.TEXT else {})}

    def show(self, status: str) -> dict[str, Any]:
        """It."""
        if self.kind is Kind.TOOL:
            call = {"call_id": self.call_id, "name": self.name, "arguments": self.text}
            return {"type": "function_call", "id": self.id, "status": status, **call}
        parts = [self.part()] if self.text else []
        if self.kind is Kind.THINKING:
            return {"type": "reasoning", "id": self.id, "status": status, "summary": [], "content": parts}
        return {"type": "message", "id": self.id, "role": "assistant", "status": status, "content": parts}


@final
class ResponsesFormat:
    """One request of /v1/responses.

    Args:
        body: the client's.
    """

    path = CHAT

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._id = ""
        self._created: object = None
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._finish: str | None = None
        self._events = 0

    def asked(self) -> object:
        """Output tokens that the client asked for; None: it did not say."""
        return self._body.get("max_output_tokens")

    def context(self) -> dict[str, Any]:
        """What vLLM's parsers read of a chat request: tools, and the choice among them."""
        chat: dict[str, Any] = {
            "model": self._body.get("model"),
            "messages": [{"role": "user", "content": ""}],
            "stream": bool(self._body.get("stream")),
        }
        tools = chat_tools(self._body.get("tools"), schema="parameters")
        if tools:
            choice = self._body.get("tool_choice") or "auto"
            if isinstance(choice, dict):
                choice = {"type": "function", "function": {"name": choice.get("name")}}
            chat |= {"tools": tools, "tool_choice": choice}
        return {"chat_request": chat}

    def chunk(self, made: dict[str, Any], usage: Usage) -> bytes:
        """Events for a derendered chunk."""
        del usage  # it is said at the end
        out = b""
        if not self._id:
            self._begin(made)
            shown = self._response("in_progress", usage=None)
            out += self._event("response.created", response=shown)
            out += self._event("response.in_progress", response=shown)
        for piece in pieces_of(made):
            out += self._piece(piece)
        self._finish = finish_of(made) or self._finish
        return out

    def _begin(self, made: Mapping[str, Any]) -> None:
        self._id = "resp_" + str(made.get("id")).removeprefix("resp_")
        self._created = made.get("created")

    def _piece(self, piece: Piece) -> bytes:
        out = b""
        item = self._open
        if item is None or (item.kind, item.index) != (piece.kind, piece.index):
            out += self._close()
            item = self._open = _Item(piece, len(self._items), self._id)
            self._items.append(item)
            out += self._event("response.output_item.added", output_index=item.number, item=item.show("in_progress"))
            if item.kind is not Kind.TOOL:
                out += self._event("response.content_part.added", **_place(item), content_index=0, part=item.part())
        item.text += piece.text
        if item.kind is Kind.TOOL:
            return out + self._event("response.function_call_arguments.delta", **_place(item), delta=piece.text)
        more = _MORE[item.kind]
        name = f"response.{_PART[item.kind][1]}.delta"
        return out + self._event(name, **_place(item), content_index=0, delta=piece.text, **more)

    def _close(self) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        if item.kind is Kind.TOOL:
            out = self._event(
                "response.function_call_arguments.done", **_place(item), name=item.name, arguments=item.text
            )
        else:
            more = _MORE[item.kind]
            name = f"response.{_PART[item.kind][1]}.done"
            out = self._event(name, **_place(item), content_index=0, text=item.text, **more)
            out += self._event("response.content_part.done", **_place(item), content_index=0, part=item.part())
        return out + self._event("response.output_item.done", output_index=item.number, item=item.show("completed"))

    def end(self, usage: Usage) -> bytes:
        """Events after the last chunk."""
        out = self._close()
        status = self._status()
        # as vLLM: `completed` in either case, and the status says which
        return out + self._event("response.completed", response=self._response(status, usage=usage))

    def whole(self, made: dict[str, Any], usage: Usage) -> dict[str, Any]:
        """The answer in one piece."""
        self._begin(made)
        self._finish = finish_of(made)
        for piece in pieces_of(made):
            item = _Item(piece, len(self._items), self._id)
            item.text = piece.text
            self._items.append(item)
        return self._response(self._status(), usage=usage)

    def failed(self, refusal: Refusal) -> bytes:
        """Events that end a stream that cannot go on."""
        error = {"code": "server_error", "message": refusal.reason}
        response = {**self._response("failed", usage=None), "error": error}
        return self._event("response.failed", response=response) if self._id else self._event("error", **error)

    def refused(self, refusal: Refusal) -> dict[str, Any]:
        """The body of an answer that is none."""
        return refusal.openai()

    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _response(self, status: str, *, usage: Usage | None) -> dict[str, Any]:
        counted = (
            None
            if usage is None
            else {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            }
        )
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": self._body.get("instructions"),
            "metadata": self._body.get("metadata"),
            "model": self._body.get("model"),
            "output": [] if status == "in_progress" else [item.show("completed") for item in self._items],
            "parallel_tool_calls": self._body.get("parallel_tool_calls", True),
            "temperature": self._body.get("temperature"),
            "tool_choice": self._body.get("tool_choice") or "auto",
            "tools": self._body.get("tools") or [],
            "top_p": self._body.get("top_p"),
            "usage": counted,
        }

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        body = msgspec.json.encode({"type": kind, "sequence_number": self._events, **fields})
        self._events += 1
        return f"event: {kind}\ndata: ".encode() + body + b"\n\n"


def _place(item: _Item) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.number}

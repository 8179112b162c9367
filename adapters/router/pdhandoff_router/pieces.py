"""What a chat chunk brings, piece by piece, for formats that have blocks in place of deltas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, final

import msgspec

__all__ = ["Kind", "Piece", "chat_tools", "finish_of", "pieces_of"]


@final
class Kind(Enum):
    """What a block holds."""

    THINKING = "thinking"
    TEXT = "text"
    TOOL = "tool"


@final
class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """More of one block."""

    kind: Kind
    text: str
    "of a tool: more of the arguments' JSON"
    index: int = 0
    "of a tool: which call"
    call_id: str = ""
    name: str = ""


def pieces_of(chat: Mapping[str, Any]) -> Iterator[Piece]:
    """Pieces of the first choice of a chat chunk, or of a whole chat answer."""
    choices = chat.get("choices") or [{}]
    said = choices[0].get("delta") or choices[0].get("message") or {}
    thought = said.get("reasoning") or said.get("reasoning_content")
    if thought:
        yield Piece(kind=Kind.THINKING, text=thought)
    if said.get("content"):
        yield Piece(kind=Kind.TEXT, text=said["content"])
    for place, call in enumerate(said.get("tool_calls") or ()):
        function = call.get("function") or {}
        yield Piece(
            kind=Kind.TOOL,
            text=function.get("arguments") or "",
            index=call.get("index", place),
            call_id=call.get("id") or "",
            name=function.get("name") or "",
        )


def finish_of(chat: Mapping[str, Any]) -> str | None:
    """The finish reason of a chunk, in chat's words."""
    choices = chat.get("choices") or [{}]
    reason: str | None = choices[0].get("finish_reason")
    return reason


def chat_tools(tools: object, *, schema: str) -> list[dict[str, Any]]:
    """Tools in chat's words.

    Args:
        tools: as the client wrote them: objects with a name.
        schema: what the client's format calls the schema of a tool's arguments.
    """
    listed: Sequence[Any] = tools if isinstance(tools, list) else ()
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description"),
                "parameters": tool.get(schema) or {},
            },
        }
        for tool in listed
        if isinstance(tool, dict) and isinstance(tool.get("name"), str)
    ]

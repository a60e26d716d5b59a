"""From the text of an answer to the deltas of a chat message: thoughts, content, tool calls."""

from __future__ import annotations

import secrets
from typing import Any

from cpmrt.server.thinking import ThinkingSplitter
from cpmrt.server.tool_calls import ToolCallFinder
from cpmrt.server.tool_formats import Call, Schemas

Delta = dict[str, Any]
"""{"content": text}, {"reasoning_content": text} or {"tool_calls": [...]}, as they stand in a chunk."""


class ChatText:
    """One choice. `schemas` None: the request has no tools, and nothing is taken for a call."""

    def __init__(self, is_thinking: bool, schemas: Schemas | None):
        self._thinking = ThinkingSplitter(is_thinking)
        self._tools = None if schemas is None else ToolCallFinder(schemas)
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def push(self, piece: str) -> list[Delta]:
        """What this piece completes."""
        thoughts, text = self._thinking.push(piece)
        calls: list[Call] = []
        if self._tools is not None and text:
            text, calls = self._tools.push(text)
        return self._deltas(thoughts, text, calls)

    def flush(self) -> list[Delta]:
        """What is still held back at the end of the answer."""
        thoughts, text = self._thinking.flush()
        calls: list[Call] = []
        if self._tools is not None:
            before, calls = self._tools.push(text)
            after, more = self._tools.flush()
            text, calls = before + after, [*calls, *more]
        return self._deltas(thoughts, text, calls)

    def _deltas(self, thoughts: str, text: str, calls: list[Call]) -> list[Delta]:
        deltas: list[Delta] = []
        if thoughts:
            deltas.append({"reasoning_content": thoughts})
        if text:
            deltas.append({"content": text})
        for call in calls:
            deltas += self._call_deltas(call)
        return deltas

    def _call_deltas(self, call: Call) -> list[Delta]:
        """The head of a call, then its arguments, as the API streams them."""
        index, self._num_calls = self._num_calls, self._num_calls + 1
        head = {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function"}
        return [
            {"tool_calls": [{**head, "function": {"name": call.name, "arguments": ""}}]},
            {"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]},
        ]


def message_of(deltas: list[Delta]) -> dict[str, Any]:
    """The message that the deltas of a choice make together."""
    texts: dict[str, list[str]] = {"content": [], "reasoning_content": []}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for name, parts in texts.items():
            parts.append(delta.get(name, ""))
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls):
                calls.append({**part, "function": dict(part["function"])})
                del calls[-1]["index"]
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    content = "".join(texts["content"])
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    message["refusal"] = None
    if any(texts["reasoning_content"]):
        message["reasoning_content"] = "".join(texts["reasoning_content"])
    if calls:
        message["tool_calls"] = calls
    return message

"""Answers and errors in the shape of Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from cpmrt.server.answers import compact_json, event
from cpmrt.server.chat_text import ChatText
from cpmrt.server.engine_thread import Item
from cpmrt.server.errors import ApiError
from cpmrt.server.growing_calls import Delta
from cpmrt.sharing.jobs import Ended

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
_DELTAS["tool_use"] = ("input_json_delta", "partial_json")


class _Part(NamedTuple):
    """Text that goes to the block that is being written, or to a new one if that has another kind or there is a `head`.

    Kinds are "text", "thinking" and "tool_use"; the text of the latter is JSON, its head has the id and the name.
    """

    kind: str
    text: str
    head: dict[str, Any] | None = None


def messages_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def messages_error_event(error: ApiError) -> str:
    """Return the event that ends a stream with an error."""
    return f"event: error\n{event(messages_error(error))}"


class MessagesFormat:
    """Writes one message: blocks of thoughts, text and tool calls in the order in which the model makes them."""

    ping = 'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, message_id: str, model_name: str, text: ChatText, prompt_tokens: int):
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model_name}
        self._text, self._prompt_tokens = text, prompt_tokens
        self._parts: list[_Part] = []
        """The parts of an answer that is not streamed."""
        self._index, self._kind = -1, ""
        """The number and the kind of the block that is being streamed."""
        self._ended: Ended | None = None

    def begin(self) -> str:
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _written("message_start", message=self._head | empty)

    def stream(self, item: Item) -> str:
        return "".join([self._streamed(part) for part in self._take(item)])

    def end(self, usage: dict[str, Any]) -> str:
        last = _written("message_delta", delta=self._stop(), usage=_usage(usage)) + _written("message_stop")
        return (self._close() if self._kind else "") + last

    def failed(self, error: ApiError) -> str:
        return messages_error_event(error)

    def add(self, item: Item) -> None:
        self._parts += self._take(item)

    def whole(self, usage: dict[str, Any]) -> Iterator[str]:
        blocks: list[list[_Part]] = []
        for part in self._parts:
            if not blocks or part.head or part.kind != blocks[-1][0].kind:
                blocks.append([])
            blocks[-1].append(part)
        content = [_block(parts) for parts in blocks]
        yield compact_json({**self._head, "content": content, **self._stop(), "usage": _usage(usage)})

    def _take(self, item: Item) -> Iterator[_Part]:
        part = item[1]
        if isinstance(part, Ended):
            self._ended = part
        for delta in self._text.flush() if isinstance(part, Ended) else self._text.push(part.text):
            yield from _parts(delta)

    def _streamed(self, part: _Part) -> str:
        events = ""
        if part.head or part.kind != self._kind:
            events = self._close() if self._kind else ""
            self._index, self._kind = self._index + 1, part.kind
            block = _block([part._replace(text="")])
            events += _written("content_block_start", index=self._index, content_block=block)
        if part.text:
            kind, name = _DELTAS[part.kind]
            delta = {"type": kind, name: part.text}
            events += _written("content_block_delta", index=self._index, delta=delta)
        return events

    def _close(self) -> str:
        return _written("content_block_stop", index=self._index)

    def _stop(self) -> dict[str, Any]:
        assert self._ended is not None
        if self._ended.reason == "length":
            reason = "max_tokens"
        elif self._ended.stop_string is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._text.has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": self._ended.stop_string}


def _parts(delta: Delta) -> Iterator[_Part]:
    if "reasoning_content" in delta:
        yield _Part("thinking", delta["reasoning_content"])
    if "content" in delta:
        yield _Part("text", delta["content"])
    for call in delta.get("tool_calls", ()):
        function = call["function"]
        head = {"id": call["id"], "name": function["name"]} if "id" in call else None
        yield _Part("tool_use", function["arguments"], head)


def _block(parts: list[_Part]) -> dict[str, Any]:
    """Return the block that these parts make together."""
    kind, text = parts[0].kind, "".join(part.text for part in parts)
    if kind == "tool_use":
        return {"type": kind, **(parts[0].head or {}), "input": json.loads(text or "{}")}
    return {"type": kind, kind: text} | ({"signature": ""} if kind == "thinking" else {})


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the counts; tokens found in the prefix cache are not among the input tokens here."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _written(kind: str, **fields: Any) -> str:
    return f"event: {kind}\n{event({'type': kind, **fields})}"

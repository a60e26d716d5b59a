"""Answers in the shape of OpenAI's Responses API: items of thoughts, text and calls, and the events about them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

from cpmrt.server.answers import compact_json, event
from cpmrt.server.chat_text import ChatText
from cpmrt.server.engine_thread import Item
from cpmrt.server.errors import ApiError
from cpmrt.server.growing_calls import Delta
from cpmrt.sharing.jobs import Ended

_ECHOED: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True, "temperature": None,
    "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": None, "reasoning": None,
    "store": False, "user": None,
}  # fmt: skip
"""Fields of the request that the answer repeats, with what stands for those that were not given."""
_LOGPROBS: dict[str, dict[str, Any]] = {"message": {"logprobs": []}}
"""Further fields of the events about the text of an item, by the item's type."""
_REASONS = {"length": "max_output_tokens"}
"""The reasons for which an answer counts as incomplete -> what this API calls them."""


class ResponsesFormat:
    """Writes one response to the request `body`."""

    ping = ": ping\n\n"

    def __init__(self, response_id: str, model_name: str, body: dict[str, Any], text: ChatText):
        echoed = {name: default if body.get(name) is None else body[name] for name, default in _ECHOED.items()}
        self._head = {
            "id": response_id, "object": "response", "created_at": int(time.time()), "model": model_name, "error": None,
            "previous_response_id": None, "truncation": "disabled", "background": False, **echoed,
        }  # fmt: skip
        self._text, self._ended = text, Ended("cancelled")
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        """Whether the last item still grows."""
        self._num_events = 0

    def begin(self) -> str:
        begun = self._response("in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def stream(self, item: Item) -> str:
        return "".join(self._take(item))

    def end(self, usage: dict[str, Any]) -> str:
        status = self._status
        return self._close(status) + self._event(f"response.{status}", response=self._response(status, usage))

    def failed(self, error: ApiError) -> str:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def add(self, item: Item) -> None:
        for _ in self._take(item):
            pass

    def whole(self, usage: dict[str, Any]) -> Iterator[str]:
        self._close(self._status)
        yield compact_json(self._response(self._status, usage))

    @property
    def _status(self) -> str:
        return "incomplete" if self._ended.reason in _REASONS else "completed"

    def _take(self, item: Item) -> Iterator[str]:
        """Yield the events of an item, which also go into the items of the answer."""
        part = item[1]
        if isinstance(part, Ended):
            self._ended = part
        for delta in self._text.flush() if isinstance(part, Ended) else self._text.push(part.text, len(part.token_ids)):
            yield self._grow(delta)

    def _grow(self, delta: Delta) -> str:
        if "reasoning_content" in delta:
            return self._open("reasoning") + self._more("response.reasoning_text", delta["reasoning_content"])
        if "content" in delta:
            return self._open("message") + self._more("response.output_text", delta["content"])
        (call,) = delta["tool_calls"]
        function, events = call["function"], ""
        if "id" in call:
            events = self._close() + self._open("function_call", call_id=call["id"], name=function["name"])
        if function["arguments"]:
            events += self._more("response.function_call_arguments", function["arguments"])
        return events

    def _open(self, kind: str, **fields: Any) -> str:
        """Begin an item of this kind, unless the last one is of it and still grows; return the events."""
        if self._is_open and self._items[-1]["type"] == kind:
            return ""
        events, item_id = self._close(), f"{kind[:3]}_{secrets.token_hex(12)}"
        item: dict[str, Any] = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            item |= {"arguments": ""}
        self._items.append(item)
        self._is_open = True
        events += self._event("response.output_item.added", output_index=self._index, item=item)
        if kind != "function_call":
            item["content"].append(_part(kind))
            events += self._event("response.content_part.added", **self._place, part=item["content"][0])
        return events

    def _more(self, name: str, text: str) -> str:
        """Add text to the last item; return the event."""
        item = self._items[-1]
        if item["type"] == "function_call":
            item["arguments"] += text
            return self._event(f"{name}.delta", item_id=item["id"], output_index=self._index, delta=text)
        item["content"][0]["text"] += text
        return self._event(f"{name}.delta", **self._place, delta=text, **_LOGPROBS.get(item["type"], {}))

    def _close(self, status: str = "completed") -> str:
        """End the last item if it is open; return the events.

        An item that another one follows is "completed", however the answer ends.
        """
        if not self._is_open:
            return ""
        item, self._is_open = self._items[-1], False
        item["status"] = status
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events = self._event(
                "response.function_call_arguments.done", item_id=item["id"], output_index=self._index, **done
            )
        else:
            part = item["content"][0]
            done = {"text": part["text"], **_LOGPROBS.get(item["type"], {})}
            events = self._event(f"response.{part['type']}.done", **self._place, **done)
            events += self._event("response.content_part.done", **self._place, part=part)
        return events + self._event("response.output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": self._index, "content_index": 0}

    def _response(self, status: str, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        reason = _REASONS.get(self._ended.reason)
        return {
            **self._head,
            "status": status,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "output": self._items,
            "usage": usage and _usage(usage, self._text.num_thought_tokens),
        }

    def _event(self, kind: str, **fields: Any) -> str:
        number, self._num_events = self._num_events, self._num_events + 1
        return f"event: {kind}\n{event({'type': kind, 'sequence_number': number, **fields})}"


def _part(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _usage(usage: dict[str, Any], num_thought_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_thought_tokens},
        "total_tokens": usage["total_tokens"],
    }

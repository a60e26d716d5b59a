"""Server-sent events with the chunks of an answer. The hot path: what never changes is formatted once a stream."""

from __future__ import annotations

import json
from typing import Any

DONE = "data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode


def to_bytes(text: str) -> bytes:
    """UTF-8; half of a surrogate pair, which only a tool call can hold, becomes a question mark."""
    return text.encode("utf-8", "replace")


def event(value: dict[str, Any]) -> str:
    """One event with a JSON object."""
    return f"data: {_encode(value)}\n\n"


class Chunks:
    """The events of one stream. `head` are the fields that all of its chunks begin with."""

    def __init__(self, head: dict[str, Any], *, include_usage: bool):
        self._head = head
        self._before = "data: " + _encode(head)[:-1] + ',"choices":[{"index":'
        self._after = '}],"usage":null}\n\n' if include_usage else "}]}\n\n"
        self._plain_after = ',"logprobs":null,"finish_reason":null' + self._after

    def delta(self, choice: int, name: str, value: Any) -> str:
        """A chunk whose choice has only one thing to say: `name` is "delta" or "text"."""
        return f'{self._before}{choice},"{name}":{_encode(value)}{self._plain_after}'

    def full(self, choice: int, name: str, value: Any, logprobs: Any, finish_reason: str | None) -> str:
        """A chunk with log-probabilities or the reason of the end."""
        fields = f'"{name}":{_encode(value)},"logprobs":{_encode(logprobs)},"finish_reason":{_encode(finish_reason)}'
        return f"{self._before}{choice},{fields}{self._after}"

    def usage(self, usage: dict[str, Any]) -> str:
        """The last chunk, which has no choice."""
        return event({**self._head, "choices": [], "usage": usage})

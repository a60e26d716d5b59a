"""The tool calls of one answer as deltas of the OpenAI API: whole ones, and those that are still being written."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator
from typing import Any

from cpmrt.tool_use.calls import Call

Delta = dict[str, Any]
"""A part of a message as a chunk has it: {"content": text}, {"reasoning_content": text} or {"tool_calls": [...]}."""


class CallDeltas:
    """Makes the deltas of an answer's calls and numbers the calls. `one_call`: those after the first are left out."""

    def __init__(self, *, one_call: bool):
        self._one_call = one_call
        self.num_calls = 0
        self._begun: deque[tuple[int, int]] = deque()
        """Calls of the open block that were begun: the number of each, and the length of its arguments so far."""

    def whole(self, calls: list[Call]) -> Iterator[Delta]:
        """Yield the deltas that are still missing of calls that are complete."""
        for call in calls:
            if self._begun:
                yield from _more(*self._begun.popleft(), call.arguments)
            else:
                yield from self._begin(call)

    def growing(self, calls: list[Call]) -> Iterator[Delta]:
        """Yield the deltas of what is new in the calls of the open block; an empty list means that the block is closed.

        The calls begin as they did when this was called last.
        """
        if not calls:
            self._begun.clear()
        for place, call in enumerate(calls):
            if place == len(self._begun):
                number = self.num_calls
                yield from self._begin(call)
                if self.num_calls == number:
                    return
                self._begun.append((number, len(call.arguments)))
            else:
                number, length = self._begun[place]
                yield from _more(number, length, call.arguments)
                self._begun[place] = number, max(length, len(call.arguments))

    def _begin(self, call: Call) -> Iterator[Delta]:
        """Yield the head of a call and its arguments."""
        if self._one_call and self.num_calls:
            return
        number, self.num_calls = self.num_calls, self.num_calls + 1
        head = {"index": number, "id": f"call_{secrets.token_hex(12)}", "type": "function"}
        yield {"tool_calls": [{**head, "function": {"name": call.name, "arguments": ""}}]}
        yield from _more(number, 0, call.arguments)


def _more(number: int, length: int, arguments: str) -> Iterator[Delta]:
    """Yield the delta of a call's arguments behind their first `length` characters, if there are more."""
    if arguments[length:]:
        yield {"tool_calls": [{"index": number, "function": {"arguments": arguments[length:]}}]}

"""The text of a chat answer, split as it comes into thoughts, content and tool calls.

Thoughts stand in `<think>...</think>` (MiniCPM4.1, MiniCPM5, Qwen) or `<|thought_start|>...<|thought_end|>` (MiniCPM3),
at the beginning of an answer only: further on these markers are text. `cpmrt.tool_use` reads the tool calls.
"""

from __future__ import annotations

import json
from typing import Any

from cpmrt.server.growing_calls import CallDeltas, Delta
from cpmrt.text.markers import THINKING_PAIRS, held_back
from cpmrt.tool_use.calls import Call, Schemas
from cpmrt.tool_use.finder import CallFinder
from cpmrt.tool_use.formats import Format


class ChatText:
    """Turns the text of one choice into deltas. `schemas` None: the request has no tools, so nothing is a call.

    `thought_end` is the marker that ends the thought which the prompt has opened, None where it has opened none.
    `one_call`: calls after the first are left out. `bound` is the format of calls if a grammar enforces it: what begins
    a call is one then. If the answer ends within such a call, the call has the arguments that are there; with
    `objects_only` it is left out unless they are a whole object. `calls_only`: the answer is calls alone, so one that
    is cut before its name is certain does not become text either. `grows`: arguments come bit by bit, in several
    deltas; the whole message is the same without. `only_known`: a block with a call of another tool than those of
    `schemas` is text.
    """

    def __init__(
        self,
        thought_end: str | None,
        schemas: Schemas | None,
        *,
        one_call: bool = False,
        bound: Format | None = None,
        calls_only: bool = False,
        objects_only: bool = False,
        grows: bool = True,
        only_known: bool = False,
    ):
        self._thinking, self._bound = _ThinkingSplitter(thought_end), bound
        self._calls_only, self._objects_only, self._grows = calls_only, objects_only, grows
        self._tools = None if schemas is None else CallFinder(schemas, only_known=only_known)
        self._calls = CallDeltas(one_call=one_call)
        self._is_cut = False
        self._num_before_text = 0
        """The number of tokens of the pieces that came until the thought had ended, or certainly was none."""

    @property
    def num_thought_tokens(self) -> int:
        """The number of tokens that the thought took, with its markers; the one that ends it may hold text too."""
        return self._num_before_text if self._thinking.has_thought else 0

    @property
    def has_calls(self) -> bool:
        """Whether the answer has calls to make; False if the last one is cut."""
        return self._calls.num_calls > 0 and not self._is_cut

    def push(self, piece: str, num_tokens: int = 0) -> list[Delta]:
        """Return the deltas that this piece, of `num_tokens` tokens, completes."""
        if not self._thinking.is_done:
            self._num_before_text += num_tokens
        thoughts, text = self._thinking.push(piece)
        if self._tools is None and not thoughts:
            return [{"content": text}] if text else []
        text, calls = self._tools.push(text) if self._tools and text else (text, [])
        deltas = self._deltas(thoughts, text, calls)
        if self._grows and self._bound is not None and self._tools is not None and not self._tools.is_long:
            deltas += self._calls.growing(self._tools.growing(self._bound))
        return deltas

    def flush(self) -> list[Delta]:
        """Return what is still held back at the end of the answer."""
        thoughts, text = self._thinking.flush()
        if self._tools is None:
            return self._deltas(thoughts, text, [])
        deltas = self._deltas(thoughts, *self._tools.push(text))
        cut = self._tools.growing(self._bound) if self._bound is not None else []
        if not cut and not self._calls_only:
            return deltas + self._deltas("", *self._tools.flush())
        whole = self._tools.unclosed()
        if whole:
            return deltas + list(self._calls.whole(whole))
        if self._objects_only:
            cut = [call for call in cut if _is_whole(call)]
        self._is_cut = bool(cut) and not _is_whole(cut[-1])
        return deltas + list(self._calls.growing(cut))

    def _deltas(self, thoughts: str, text: str, calls: list[Call]) -> list[Delta]:
        deltas: list[Delta] = []
        if thoughts:
            deltas.append({"reasoning_content": thoughts})
        if text:
            deltas.append({"content": text})
        deltas += self._calls.whole(calls)
        return deltas


def _is_whole(call: Call) -> bool:
    """Tell whether the arguments of a call are JSON already."""
    try:
        json.loads(call.arguments)
    except (ValueError, RecursionError):
        return False
    return True


class Message:
    """The message that the deltas of a choice make together."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._content.append(delta.get("content", ""))
            self._thoughts.append(delta.get("reasoning_content", ""))
            for part in delta.get("tool_calls", ()):
                self._add_call(part)

    def content(self) -> dict[str, Any]:
        """Return the message as the API has it."""
        content, thoughts = "".join(self._content), "".join(self._thoughts)
        message = {"role": "assistant", "content": content if content or not self._calls else None, "refusal": None}
        if thoughts:
            message["reasoning_content"] = thoughts
        return message | ({"tool_calls": self._calls} if self._calls else {})

    def _add_call(self, part: dict[str, Any]) -> None:
        function = part["function"]
        if part["index"] == len(self._calls):
            self._calls.append({"id": part["id"], "type": part["type"], "function": dict(function)})
        else:
            self._calls[part["index"]]["function"]["arguments"] += function["arguments"]


class _ThinkingSplitter:
    """Splits text into (thoughts, text) as soon as that is certain. White space around the thoughts is dropped."""

    def __init__(self, thought_end: str | None):
        self._end = thought_end or ""
        """The marker that ends the open thought; "" outside of one."""
        self.has_thought = bool(thought_end)
        self.is_done = False
        """Whether a thought has ended, or none has begun."""
        self._held = ""
        self._trims = True

    def push(self, piece: str) -> tuple[str, str]:
        """Return the thoughts and the text that this piece completes."""
        if self.is_done and not self._trims:
            return "", piece
        self._held += piece
        thoughts = ""
        if not self.is_done and not self._end:
            self._look_for_start()
        if self._end:
            thoughts = self._take_thoughts()
        return thoughts, self._take_text() if self.is_done else ""

    def flush(self) -> tuple[str, str]:
        """Return what is still held back, now that no more will come."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._end else ("", held)

    def _look_for_start(self) -> None:
        text = self._held.lstrip()
        for start, end in THINKING_PAIRS.items():
            if text.startswith(start):
                self._end, self._held, self.has_thought = end, text[len(start) :], True
                return
        if text and not any(start.startswith(text) for start in THINKING_PAIRS):
            self.is_done, self._trims = True, False

    def _take_thoughts(self) -> str:
        self._trim_start()
        before, end, after = self._held.partition(self._end)
        if end:
            self._end, self._held = "", after
            self.is_done = self._trims = True
            return before.rstrip()
        shown = self._held[: len(self._held) - held_back(self._held, (self._end,))].rstrip()
        self._held = self._held[len(shown) :]
        return shown

    def _take_text(self) -> str:
        self._trim_start()
        text, self._held = self._held, ""
        return text

    def _trim_start(self) -> None:
        """Drop white space until something else has come."""
        if self._trims:
            self._held = self._held.lstrip()
            self._trims = not self._held

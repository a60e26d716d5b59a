"""The text of a chat answer, split as it comes into thoughts, content and tool calls.

Thoughts stand in `<think>...</think>` (MiniCPM4.1, MiniCPM5, Qwen) or `<|thought_start|>...<|thought_end|>` (MiniCPM3),
at the beginning of an answer only: further on these markers are text. `tool_formats` describes the tool calls.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

from cpmrt.server.tool_calls import Call, Schemas
from cpmrt.server.tool_formats import FORMATS, MAX_CALL_CHARACTERS, EndFinder, Format
from cpmrt.text import Tokenizer
from cpmrt.text.markers import ANSWER_MARKERS, THINKING_PAIRS
from cpmrt.text.thinking import prompt_end_of

Delta = dict[str, Any]
"""A part of a message as a chunk has it: {"content": text}, {"reasoning_content": text} or {"tool_calls": [...]}."""
_STARTS = {form.start: form for form in FORMATS}
_ANY_START = re.compile("|".join(map(re.escape, _STARTS)))


class ChatText:
    """Turns the text of one choice into deltas. `schemas` None: the request has no tools, so nothing is a call.

    `is_thinking`: the prompt has opened a thought, so that the answer begins inside it. `one_call`: calls after the
    first are left out.
    """

    def __init__(self, is_thinking: bool, schemas: Schemas | None, *, one_call: bool = False):
        self._thinking, self._one_call = _ThinkingSplitter(is_thinking), one_call
        self._tools = None if schemas is None else _ToolCallFinder(schemas)
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def push(self, piece: str) -> list[Delta]:
        """Return the deltas that this piece completes."""
        thoughts, text = self._thinking.push(piece)
        if self._tools is None and not thoughts:
            return [{"content": text}] if text else []
        text, calls = self._tools.push(text) if self._tools and text else (text, [])
        return self._deltas(thoughts, text, calls)

    def flush(self) -> list[Delta]:
        """Return what is still held back at the end of the answer."""
        thoughts, text = self._thinking.flush()
        if self._tools is None:
            return self._deltas(thoughts, text, [])
        before, calls = self._tools.push(text)
        after, more = self._tools.flush()
        return self._deltas(thoughts, before + after, [*calls, *more])

    def _deltas(self, thoughts: str, text: str, calls: list[Call]) -> list[Delta]:
        deltas: list[Delta] = []
        if thoughts:
            deltas.append({"reasoning_content": thoughts})
        if text:
            deltas.append({"content": text})
        for call in calls:
            if not (self._one_call and self._num_calls):
                deltas += self._call_deltas(call)
        return deltas

    def _call_deltas(self, call: Call) -> list[Delta]:
        """Return the head of a call and its arguments, as the API streams them."""
        index, self._num_calls = self._num_calls, self._num_calls + 1
        head = {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function"}
        return [
            {"tool_calls": [{**head, "function": {"name": call.name, "arguments": ""}}]},
            {"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]},
        ]


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


def opens_thinking(prompt_end: str) -> bool:
    """Tell whether a prompt ends inside a thought, so that the answer begins there."""
    return prompt_end.rstrip().endswith(tuple(THINKING_PAIRS))


def marker_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the markers of thoughts and calls that are special tokens; in most vocabularies they are plain text."""
    if tokenizer is None:
        return frozenset()
    ids = {tokenizer.token_id(marker) for marker in ANSWER_MARKERS}
    return frozenset(token_id for token_id in tokenizer.special_ids if token_id in ids)


def prompt_opens_thinking(ids: list[int], tokenizer: Tokenizer | None) -> bool:
    """Tell whether the answer to a prompt begins inside a thought."""
    return tokenizer is not None and opens_thinking(prompt_end_of(tokenizer, ids))


class _ThinkingSplitter:
    """Splits text into (thoughts, text) as soon as that is certain. White space around the thoughts is dropped."""

    def __init__(self, is_thinking: bool):
        self._end = "</think>" if is_thinking else ""
        """The marker that ends the open thought; "" outside of one."""
        self._is_done = False
        self._held = ""
        self._trims = True

    def push(self, piece: str) -> tuple[str, str]:
        """Return the thoughts and the text that this piece completes."""
        if self._is_done and not self._trims:
            return "", piece
        self._held += piece
        thoughts = ""
        if not self._is_done and not self._end:
            self._look_for_start()
        if self._end:
            thoughts = self._take_thoughts()
        return thoughts, self._take_text() if self._is_done else ""

    def flush(self) -> tuple[str, str]:
        """Return what is still held back, now that no more will come."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._end else ("", held)

    def _look_for_start(self) -> None:
        text = self._held.lstrip()
        for start, end in THINKING_PAIRS.items():
            if text.startswith(start):
                self._end, self._held = end, text[len(start) :]
                return
        if text and not any(start.startswith(text) for start in THINKING_PAIRS):
            self._is_done, self._trims = True, False

    def _take_thoughts(self) -> str:
        self._trim_start()
        before, end, after = self._held.partition(self._end)
        if end:
            self._end, self._held = "", after
            self._is_done = self._trims = True
            return before.rstrip()
        shown = self._held[: len(self._held) - _held_back(self._held, (self._end,))].rstrip()
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


class _ToolCallFinder:
    """Splits text into (text, calls). A block that turns out to be no call comes out as the text that it is.

    White space in front of a call, and between calls, is dropped.
    """

    def __init__(self, schemas: Schemas):
        self._schemas = schemas
        self._held = ""
        self._gap = ""
        """The white space in front of the block that is open."""
        self._form: Format | None = None
        """The format of the block that is open."""
        self._end = EndFinder(FORMATS[0])
        """Of the block that is open."""
        self._has_calls = False
        self._skips_quoted = True

    def push(self, piece: str) -> tuple[str, list[Call]]:
        """Return the text and the calls that this piece completes."""
        self._held += piece
        shown, calls = list[str](), list[Call]()
        while self._open(shown) if self._form is None else self._continue(self._form, shown, calls):
            pass
        return "".join(shown), calls

    def flush(self) -> tuple[str, list[Call]]:
        """Return what is still held back. The end of the last block may be missing: models end their turn instead.

        If the block is no call either way, a quotation may be open in it; from then on quoted end markers count.
        """
        self._skips_quoted = False
        shown, calls = list[str](), list[Call]()
        while self._form is not None:
            form, self._form = self._form, None
            if self._read(form, self._held, calls):
                self._held = ""
            else:
                block, end, self._held = self._held.partition(form.end)
                shown.append(self._gap + form.start + block + end)
            text, more = self.push("")
            shown.append(text)
            calls += more
        rest, self._held = self._held, ""
        shown.append(rest if rest.strip() or not self._has_calls else "")
        return "".join(shown), calls

    def _open(self, shown: list[str]) -> bool:
        """Show the text that cannot belong to a call, and tell whether a call begins after it."""
        found = _ANY_START.search(self._held)
        position = found.start() if found else len(self._held) - _held_back(self._held, tuple(_STARTS))
        text = self._held[:position].rstrip()
        shown.append(text)
        if found is None:
            self._held = self._held[len(text) :]
            return False
        self._gap, self._form = self._held[len(text) : position], _STARTS[found[0]]
        self._held = self._held[found.end() :]
        self._end = EndFinder(self._form, skips_quoted=self._skips_quoted)
        return True

    def _continue(self, form: Format, shown: list[str], calls: list[Call]) -> bool:
        """Close the open block if its end has come, or give it up if it is too long. Tell whether it is closed."""
        window = self._held[:MAX_CALL_CHARACTERS]
        place = self._end.find(window)
        if place is None and len(self._held) < MAX_CALL_CHARACTERS:
            return False
        if place is None:
            shown.append(self._gap + form.start + window)
            self._held = self._held[len(window) :]
        else:
            block, self._held = self._held[:place], self._held[place + len(form.end) :]
            if not self._read(form, block, calls):
                shown.append(self._gap + form.start + block + form.end)
        self._form = None
        return True

    def _read(self, form: Format, block: str, calls: list[Call]) -> bool:
        """Add the calls of a block, and tell whether it has any."""
        try:
            found = form.read(block, self._schemas)
        except ValueError:
            return False
        calls += found
        self._has_calls = self._has_calls or bool(found)
        return True


def _held_back(text: str, markers: Sequence[str]) -> int:
    """Return the length of the end of `text` that may be the beginning of a marker."""
    longest = min(len(text), max(map(len, markers)) - 1)
    firsts = {marker[0] for marker in markers}
    for length in range(longest, 0, -1):
        start = len(text) - length
        if text[start] in firsts and any(marker.startswith(text[start:]) for marker in markers):
            return length
    return 0

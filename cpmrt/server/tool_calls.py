"""Finds tool calls in an answer that arrives in pieces."""

from __future__ import annotations

from cpmrt.server.markers import find_first, held_back
from cpmrt.server.tool_formats import FORMATS, MAX_CALL_CHARACTERS, Call, Format, Schemas

_STARTS = {form.start: form for form in FORMATS}


class ToolCallFinder:
    """Text in, (text, calls) out. A block that is no call after all comes out as the text that it is.

    White space in front of a call, and between calls, belongs to nobody. `num_calls` counts those found so far.
    """

    def __init__(self, schemas: Schemas):
        self._schemas = schemas
        self._held = ""
        self._gap = ""
        """White space in front of the block that is open."""
        self._form: Format | None = None
        self.num_calls = 0

    def push(self, piece: str) -> tuple[str, list[Call]]:
        """Text and calls that this piece completes."""
        self._held += piece
        shown: list[str] = []
        calls: list[Call] = []
        while self._form is None or self._form.end in self._held or len(self._held) > MAX_CALL_CHARACTERS:
            if self._form is not None:
                self._close(self._form, shown, calls)
            elif not self._open(shown):
                break
        return "".join(shown), calls

    def flush(self) -> tuple[str, list[Call]]:
        """What is still held back. The end of the last block may be missing: models end their turn instead."""
        shown: list[str] = []
        calls: list[Call] = []
        if self._form is not None:
            self._close(self._form, shown, calls)
        rest, self._held = self._held, ""
        shown.append(rest if rest.strip() or not self.num_calls else "")
        return "".join(shown), calls

    def _open(self, shown: list[str]) -> bool:
        """Show what cannot belong to a call; whether a call begins after it."""
        found = find_first(self._held, tuple(_STARTS))
        if found is None:
            kept = held_back(self._held, tuple(_STARTS))
            text = self._held[: len(self._held) - kept].rstrip()
            shown.append(text)
            self._held = self._held[len(text) :]
            return False
        position, start = found
        text = self._held[:position].rstrip()
        shown.append(text)
        self._gap = self._held[len(text) : position]
        self._form, self._held = _STARTS[start], self._held[position + len(start) :]
        return True

    def _close(self, form: Format, shown: list[str], calls: list[Call]) -> None:
        block, end, rest = self._held.partition(form.end)
        self._form, self._held = None, rest
        try:
            found = form.read(block, self._schemas)
        except ValueError:
            shown.append(self._gap + form.start + block + end)
            return
        calls += found
        self.num_calls += len(found)

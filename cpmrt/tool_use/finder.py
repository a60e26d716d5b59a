"""Finds tool calls in the text of an answer, while it comes or when it is complete."""

from __future__ import annotations

import re

from cpmrt.text.markers import THINKING_PAIRS, held_back
from cpmrt.tool_use.calls import Call, Schemas
from cpmrt.tool_use.formats import FORMATS, MAX_CALL_CHARACTERS, EndFinder, Format
from cpmrt.tool_use.growing import MAX_GROWING, growing_calls

_STARTS = {form.start: form for form in FORMATS}
_ANY_START = re.compile("|".join(map(re.escape, _STARTS)))


class CallFinder:
    """Splits the text of an answer into text and calls. A block that turns out to be no call is returned as text.

    With `only_known` a block is no call if it has one of a tool without a schema. White space in front of a call, and
    between calls, is dropped.
    """

    def __init__(self, schemas: Schemas, *, only_known: bool = False):
        self._schemas, self._only_known = schemas, only_known
        self._held = ""
        self._gap = ""
        """The white space in front of the block that is open."""
        self._form: Format | None = None
        """The format of the block that is open."""
        self._end = EndFinder(FORMATS[0])
        """Finds the end of the block that is open."""
        self._has_calls = False
        self._skips_quoted = True

    @property
    def is_long(self) -> bool:
        """Whether the open block has become too long to be read again and again."""
        return self._form is not None and len(self._held) > MAX_GROWING

    def growing(self, form: Format) -> list[Call]:
        """Return the calls in the open block if it is of this format, their arguments as far as they are certain."""
        return growing_calls(form, self._held, self._schemas) if self._form is form else []

    def unclosed(self) -> list[Call]:
        """Return the calls in the open block if only its end marker is missing: models end their turn instead."""
        calls = list[Call]()
        if self._form is not None:
            self._read(self._form, self._held, calls)
        return calls

    def push(self, piece: str) -> tuple[str, list[Call]]:
        """Return the text and the calls that this piece completes."""
        self._held += piece
        shown, calls = list[str](), list[Call]()
        while self._open(shown) if self._form is None else self._continue(self._form, shown, calls):
            pass
        return "".join(shown), calls

    def flush(self) -> tuple[str, list[Call]]:
        """Return the text and the calls still held back. The end marker of the last block may be missing.

        Models end their turn instead. If the block is no call even so, a quotation may be open in it, so that from then
        on end markers count even where they are quoted.
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
        """Add the text that cannot belong to a call to `shown`, and return whether a block begins after it."""
        found = _ANY_START.search(self._held)
        position = found.start() if found else len(self._held) - held_back(self._held, tuple(_STARTS))
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
        """Close the open block if its end has come, or give it up if it is too long. Return whether it is closed."""
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
        """Add the calls of a block to `calls`, and return whether the block could be read as calls."""
        try:
            found = form.read(block, self._schemas)
        except ValueError:
            return False
        if self._only_known and any(call.name not in self._schemas for call in found):
            return False
        calls += found
        self._has_calls = self._has_calls or bool(found)
        return True


def calls_in(
    text: str, schemas: Schemas, thought_end: str | None = None, *, only_known: bool = False
) -> tuple[Call, ...]:
    """Return the calls in a complete answer, except those in its thought; `only_known` as for CallFinder.

    `thought_end` is the closing marker of a thought that the prompt has opened, None if it has opened none.
    """
    finder = CallFinder(schemas, only_known=only_known)
    return tuple([*finder.push(_behind_thought(text, thought_end))[1], *finder.flush()[1]])


def _behind_thought(text: str, thought_end: str | None) -> str:
    """Return the part of an answer after the thought that it begins with; all of it if it begins with none."""
    begun = (closing for opening, closing in THINKING_PAIRS.items() if text.lstrip().startswith(opening))
    closing = thought_end or next(begun, None)
    return text if closing is None else text.partition(closing)[2]

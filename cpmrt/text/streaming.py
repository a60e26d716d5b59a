"""Text that arrives in pieces: token ids to characters, and the end at a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from cpmrt.errors import RequestError
from cpmrt.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns the tokens of one sequence into text as they come: each character as soon as it is complete, none before.

    All pieces together are what `tokenizer.decode(prompt + output)` adds to the prompt's text, without special tokens
    but those of `shown_ids`: the space in front of a first word is kept. Bytes that are not UTF-8 become U+FFFD once
    that is certain. A character that the prompt leaves unfinished belongs to the output. The cost of a token does not
    depend on those before it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), shown_ids: frozenset[int] = frozenset()):
        self._tokenizer, self._shown_ids = tokenizer, shown_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for token_id in reversed(prompt_ids):
            if len(tail) >= 3:  # an unfinished character has at most three bytes
                break
            tail = tokenizer.token_bytes(token_id) + tail
        self._at_start = not tail
        self._utf8.decode(tail)

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete, "" inside a character. Raises RequestError on a negative id."""
        pieces: list[bytes] = []
        for token_id in token_ids:
            if token_id in self._shown_ids:
                pieces.append(self._tokenizer.written_bytes(token_id))
                continue
            pieces.append(self._tokenizer.token_bytes(token_id, first=self._at_start))
            self._at_start = self._at_start and not self._tokenizer.token_bytes(token_id)
        return self._utf8.decode(b"".join(pieces))

    def flush(self) -> str:
        """Return the rest after the last token: "" or one U+FFFD for a character that was never finished."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Cuts text before the first stop string, and shows as much of it as early as possible.

    The first match is the one that ends earliest, so it does not matter where the text is split into pieces; of several
    that end at the same character the longest counts. Each stop string is followed by the automaton of Knuth, Morris
    and Pratt (1977): constant work per character.
    """

    def __init__(self, stop: tuple[str, ...]):
        if not all(isinstance(text, str) and text for text in stop):
            raise RequestError("stop strings", expected="non-empty strings", actual=repr(stop))
        self._stop = stop
        self._borders = [_borders(text) for text in stop]
        self._matched = [0] * len(stop)
        self._held = ""
        self._hit = False

    def push(self, piece: str) -> tuple[str, bool]:
        """Return the text that may be shown now, and whether a stop string was hit; then no more text follows."""
        if self._hit:
            return "", True
        if not self._stop:
            return piece, False
        text, before = self._held + piece, len(self._held)
        for index, char in enumerate(piece):
            longest = self._advance(char)
            if longest:
                self._held, self._hit = "", True
                return text[: before + index + 1 - longest], True
        shown = len(text) - max(self._matched)
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """Return the text still held back, now that no more will come; "" after a hit."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stop)
        return held

    def _advance(self, char: str) -> int:
        """Return the length of the longest stop string that ends with this character, 0 if none does."""
        longest = 0
        for i, (stop, borders) in enumerate(zip(self._stop, self._borders, strict=True)):
            matched = self._matched[i]
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            matched += stop[matched] == char
            self._matched[i] = matched
            if matched == len(stop):
                longest = max(longest, matched)
        return longest


def _borders(text: str) -> list[int]:
    """Return, for each prefix of the text, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        length += text[i] == text[length]
        borders[i] = length
    return borders

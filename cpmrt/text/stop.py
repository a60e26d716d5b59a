"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from cpmrt.errors import RequestError


class StopStrings:
    """Cuts text before the first stop string, and shows as much of it as early as possible.

    The first match is the one that ends earliest, character by character, so where a text is split into pieces
    makes no difference; of several that end at the same character the longest counts. Each stop string is
    followed by the automaton of Knuth, Morris and Pratt (1977): constant work per character.
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
        """Text that may be shown now, and whether a stop string was hit; after a hit nothing more is shown."""
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
        """The text still held back, now that no more will come; "" after a hit."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stop)
        return held

    def _advance(self, char: str) -> int:
        """Length of the longest stop string that ends with this character, 0 if none does."""
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
    """For each prefix of the text, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        length += text[i] == text[length]
        borders[i] = length
    return borders

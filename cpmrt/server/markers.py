"""Where a marker such as `<think>` begins in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Position and text of the marker that begins first, None if there is none."""
    found = [(text.find(marker), marker) for marker in markers]
    return min(((at, marker) for at, marker in found if at >= 0), default=None)


def held_back(text: str, markers: Sequence[str]) -> int:
    """Length of the end of `text` that may be the beginning of a marker."""
    longest = min(len(text), max(map(len, markers)) - 1)
    firsts = {marker[0] for marker in markers}
    for length in range(longest, 0, -1):
        start = len(text) - length
        if text[start] in firsts and any(marker.startswith(text[start:]) for marker in markers):
            return length
    return 0

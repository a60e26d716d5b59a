"""Splits an answer into what the model thinks and what it says.

Formats: `<think>...</think>` (MiniCPM4.1, MiniCPM5, Qwen) and `<|thought_start|>...<|thought_end|>` (MiniCPM3). Only at
the beginning of an answer: further on the markers are text. White space around the thoughts belongs to neither.
"""

from __future__ import annotations

from cpmrt.server.markers import held_back

_PAIRS = {"<think>": "</think>", "<|thought_start|>": "<|thought_end|>"}

THINKING_MARKERS = (*_PAIRS, *_PAIRS.values())


def opens_thinking(prompt_end: str) -> bool:
    """Whether a prompt ends inside a thought, so that the answer begins there."""
    return prompt_end.rstrip().endswith(tuple(_PAIRS))


class ThinkingSplitter:
    """Text in, (thoughts, text) out, as soon as it is certain which it is."""

    def __init__(self, is_thinking: bool):
        self._end = "</think>" if is_thinking else ""
        self._is_done = False
        self._held = ""
        self._trims = True

    def push(self, piece: str) -> tuple[str, str]:
        """Thoughts and text that this piece completes."""
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
        """What is still held back, now that no more will come."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._end else ("", held)

    def _look_for_start(self) -> None:
        text = self._held.lstrip()
        for start, end in _PAIRS.items():
            if text.startswith(start):
                self._end, self._held = end, text[len(start) :]
                return
        if text and not any(start.startswith(text) for start in _PAIRS):
            self._is_done, self._trims = True, False

    def _take_thoughts(self) -> str:
        if self._trims:
            self._held = self._held.lstrip()
            self._trims = not self._held
        before, end, after = self._held.partition(self._end)
        if end:
            self._end, self._held = "", after
            self._is_done = self._trims = True
            return before.rstrip()
        keep = held_back(self._held, (self._end,))
        shown = self._held[: len(self._held) - keep].rstrip()
        self._held = self._held[len(shown) :]
        return shown

    def _take_text(self) -> str:
        """The text after the thoughts, without the white space in front of it."""
        if self._trims:
            self._held = self._held.lstrip()
            self._trims = not self._held
        text, self._held = self._held, ""
        return text

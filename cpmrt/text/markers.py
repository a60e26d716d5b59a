"""The markers in an answer around thoughts and tool calls. Some vocabularies have special tokens for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpmrt.text.tokenizer import Tokenizer

THINKING_PAIRS = {"<think>": "</think>", "<|thought_start|>": "<|thought_end|>"}
"""Marker that opens a thought -> marker that closes it: of MiniCPM4.1, MiniCPM5 and Qwen, and of MiniCPM3."""
TOOL_MARKERS = (
    "<tool_call>", "</tool_call>", "<|tool_call_start|>", "<|tool_call_end|>",
    "<function", "</function>", "<param", "</param>",
)  # fmt: skip
ANSWER_MARKERS = frozenset({*THINKING_PAIRS, *THINKING_PAIRS.values(), *TOOL_MARKERS})


def marker_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the ids of the markers that are special tokens (`special_markers`); none without a tokenizer."""
    return frozenset() if tokenizer is None else frozenset(special_markers(tokenizer).values())


def special_markers(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the markers that are special tokens, by marker; in most vocabularies markers are plain text."""
    found = ((marker, tokenizer.token_id(marker)) for marker in ANSWER_MARKERS)
    return {marker: number for marker, number in found if number is not None and number in tokenizer.special_ids}


def held_back(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that may be the beginning of a marker."""
    longest = min(len(text), max(map(len, markers)) - 1)
    firsts = {marker[0] for marker in markers}
    for length in range(longest, 0, -1):
        start = len(text) - length
        if text[start] in firsts and any(marker.startswith(text[start:]) for marker in markers):
            return length
    return 0

"""Finds the thought that a prompt or an answer leaves open, and the tokens that close it when its budget is spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpmrt.errors import RequestError
from cpmrt.text.chat_template import ChatTemplate
from cpmrt.text.markers import THINKING_PAIRS
from cpmrt.text.tokenizer import Tokenizer

_QUESTION = [{"role": "user", "content": "?"}]
_MARKER_TOKENS = 16
"""The number of tokens at the end of a prompt among which the marker that opens a thought is looked for."""
_USUAL_GAP = "\n\n"
"""The text between a thought and its answer if the template does not say."""


@dataclass(frozen=True)
class ThoughtEnd:
    """Finds the tokens that close the open thought of an answer to one prompt.

    A thought is opened at the end of the prompt (`prompt_end`, at least its last tokens) or at the very beginning of
    the answer. `closings` maps each closing marker to the tokens that close the thought.
    """

    tokenizer: Tokenizer
    prompt_end: str
    closings: dict[str, tuple[int, ...]]

    def __call__(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that close the thought in an answer of these tokens; none if no thought is open."""
        answer = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        marker = open_marker(self.prompt_end, answer)
        return () if marker is None else self.closings[marker]


def closings(tokenizer: Tokenizer, template: ChatTemplate | None) -> dict[str, tuple[int, ...]]:
    """Return the tokens that close a thought, by its closing marker. `template` is None for a model without one.

    Raises CheckpointError.
    """
    return {marker: _encoded(tokenizer, closing_text(template, marker)) for marker in THINKING_PAIRS.values()}


def prompt_end_of(tokenizer: Tokenizer, token_ids: Sequence[int], num_begun: int = 0) -> str:
    """Return the end of a prompt as text, which ends with an opening marker if a thought is open.

    If the last `num_begun` tokens are the beginning of the answer already, return the opening marker of the thought
    that is open after them, or their own text if none is.
    """
    start = len(token_ids) - num_begun
    before = tokenizer.decode(token_ids[max(0, start - _MARKER_TOKENS) : start], skip_special_tokens=False)
    if not num_begun:
        return before
    begun = tokenizer.decode(token_ids[start:], skip_special_tokens=False)
    closing = open_marker(before, begun)
    return next((opening for opening, end in THINKING_PAIRS.items() if end == closing), begun)


def opened_thought(tokenizer: Tokenizer | None, prompt_ids: Sequence[int], num_begun: int = 0) -> str | None:
    """Return the closing marker of the thought that a prompt leaves open; None if it leaves none open."""
    return None if tokenizer is None else open_marker(prompt_end_of(tokenizer, prompt_ids, num_begun), "")


def open_marker(prompt_end: str, answer: str) -> str | None:
    """Return the closing marker of the thought that is open after an answer; None if none is open."""
    for opening, closing in THINKING_PAIRS.items():
        if prompt_end.rstrip().endswith(opening) or answer.lstrip().startswith(opening):
            return None if closing in answer else closing
    return None


def opening_tokens(tokenizer: Tokenizer) -> tuple[tuple[int, bytes], ...]:
    """Return the opening markers that are single tokens: their ids, each with the bytes of the closing marker."""
    found = ((tokenizer.token_id(opening), closing.encode()) for opening, closing in THINKING_PAIRS.items())
    return tuple((token, closing) for token, closing in found if token is not None)


def closing_text(template: ChatTemplate | None, marker: str) -> str:
    """Return the text that closes a thought: the marker, and the gap that the template puts after an empty thought."""
    gap = _USUAL_GAP
    try:
        prompt = template.render(_QUESTION, enable_thinking=False) if template else ""
    except RequestError:  # the template wants other messages
        prompt = ""
    _, found, rest = prompt.rpartition(marker)
    if found and rest and not rest.strip():
        gap = rest
    return f"\n{marker}{gap}"


def _encoded(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the tokens of a text that continues another. It is encoded after a full stop, as some tokenizers put a
    space in front of a text."""
    before = tokenizer.encode(".", add_special_tokens=False)
    whole = tokenizer.encode(f".{text}", add_special_tokens=False)
    is_split = whole[: len(before)] == before
    return tuple(whole[len(before) :] if is_split else tokenizer.encode(text, add_special_tokens=False))

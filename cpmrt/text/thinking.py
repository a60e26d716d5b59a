"""Finds the thought that a prompt or an answer is in, and the tokens that close one which has used up its budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpmrt.errors import RequestError
from cpmrt.text.chat_template import ChatTemplate
from cpmrt.text.markers import THINKING_PAIRS
from cpmrt.text.tokenizer import Tokenizer

_QUESTION = [{"role": "user", "content": "?"}]
_MARKER_TOKENS = 16
"""The most tokens that the marker of an opened thought takes at the end of a prompt."""
_USUAL_GAP = "\n\n"
"""What stands between a thought and its answer where the template does not say."""


@dataclass(frozen=True)
class ThoughtEnd:
    """Gives the tokens that close the thought which an answer to one prompt is in.

    A thought is opened at the end of the prompt (`prompt_end`, at least its last tokens) or at the very beginning of
    the answer. `closings` are the tokens for each marker.
    """

    tokenizer: Tokenizer
    prompt_end: str
    closings: dict[str, tuple[int, ...]]

    def __call__(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the closing tokens for an answer of these tokens, none if no thought is open."""
        answer = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        marker = open_marker(self.prompt_end, answer)
        return () if marker is None else self.closings[marker]


def closings(tokenizer: Tokenizer, template: ChatTemplate | None) -> dict[str, tuple[int, ...]]:
    """Find out with which tokens the model closes a thought, for each marker. `template` None: it has none.

    Raises CheckpointError.
    """
    return {marker: _encoded(tokenizer, closing_text(template, marker)) for marker in THINKING_PAIRS.values()}


def prompt_end_of(tokenizer: Tokenizer, token_ids: Sequence[int], num_begun: int = 0) -> str:
    """Return the end of a prompt, in which the marker of an opened thought stands if there is one.

    The last `num_begun` tokens are the answer's already: the marker of a thought that they leave open stands for them.
    """
    start = len(token_ids) - num_begun
    before = tokenizer.decode(token_ids[max(0, start - _MARKER_TOKENS) : start], skip_special_tokens=False)
    if not num_begun:
        return before
    begun = tokenizer.decode(token_ids[start:], skip_special_tokens=False)
    closing = open_marker(before, begun)
    return next((opening for opening, end in THINKING_PAIRS.items() if end == closing), begun)


def opened_thought(tokenizer: Tokenizer | None, prompt_ids: Sequence[int], num_begun: int = 0) -> str | None:
    """Return the marker that ends the thought which a prompt has opened; None: it has opened none."""
    return None if tokenizer is None else open_marker(prompt_end_of(tokenizer, prompt_ids, num_begun), "")


def open_marker(prompt_end: str, answer: str) -> str | None:
    """Return the marker that ends the thought which is open behind an answer; None: there is none."""
    for opening, closing in THINKING_PAIRS.items():
        if prompt_end.rstrip().endswith(opening) or answer.lstrip().startswith(opening):
            return None if closing in answer else closing
    return None


def opening_tokens(tokenizer: Tokenizer) -> tuple[tuple[int, bytes], ...]:
    """Return the tokens that are the marker of a thought's beginning, with the bytes of the marker that ends it."""
    found = ((tokenizer.token_id(opening), closing.encode()) for opening, closing in THINKING_PAIRS.items())
    return tuple((token, closing) for token, closing in found if token is not None)


def closing_text(template: ChatTemplate | None, marker: str) -> str:
    """Return what closes a thought: the marker, and the gap that the template leaves after a thought that is empty."""
    gap = _USUAL_GAP
    try:
        prompt = template.render(_QUESTION, enable_thinking=False) if template else ""
    except RequestError:  # a template that wants other messages
        prompt = ""
    _, found, rest = prompt.rpartition(marker)
    if found and rest and not rest.strip():
        gap = rest
    return f"\n{marker}{gap}"


def _encoded(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Encode text that goes on another: behind a full stop, as some tokenizers begin a text with a space."""
    before = tokenizer.encode(".", add_special_tokens=False)
    whole = tokenizer.encode(f".{text}", add_special_tokens=False)
    is_split = whole[: len(before)] == before
    return tuple(whole[len(before) :] if is_split else tokenizer.encode(text, add_special_tokens=False))

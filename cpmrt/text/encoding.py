"""Encodes a text of any length with the `tokenizers` library, while other threads can run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cpmrt.errors import SHORTEN_PROMPT, ContextLengthError


def encode_freely(library: Any, text: str) -> Any:
    """Return the library's encoding of a text, without BOS and offsets.

    `library.encode` would hold the interpreter's lock until it is done, a second for a megabyte; this call does not.
    """
    return library.encode_batch_fast([text], add_special_tokens=False)[0]


@dataclass(frozen=True)
class PromptLimit:
    """The most tokens that a prompt may have, and so the most bytes: `longest_token` is the most bytes of a token."""

    num_tokens: int
    longest_token: int

    def check_bytes(self, num_bytes: int) -> None:
        """Raise ContextLengthError if a text of so many bytes cannot fit. Costs nothing, so it is checked first."""
        if num_bytes > self.num_tokens * self.longest_token:
            raise ContextLengthError(
                f"the prompt has {num_bytes} bytes",
                expected=f"at most {self.longest_token} for each of the {self.num_tokens} tokens of the context",
                fix=SHORTEN_PROMPT,
            )

    def check_tokens(self, count: int) -> None:
        """Raise ContextLengthError if there are too many tokens."""
        if count > self.num_tokens:
            raise ContextLengthError.of("the prompt", self.num_tokens, count)


def longest_token(content: Mapping[str, Any]) -> int:
    """Return the bytes of the longest token of a tokenizer.json, by its spelling there.

    A spelling is never shorter than the bytes that its token stands for (`<0xE4>` is one byte), so this is a bound.
    """
    vocab: Mapping[str, int] | list[tuple[str, float]] = content["model"]["vocab"]
    texts: Iterable[str] = vocab if isinstance(vocab, Mapping) else (text for text, _ in vocab)
    added = [token["content"] for token in content.get("added_tokens") or ()]
    return max((len(text.encode("utf-8", "replace")) for text in (*texts, *added)), default=1)


def largest_id(content: Mapping[str, Any]) -> int:
    """Return the largest id in the vocabulary of a tokenizer.json, -1 without any. Added tokens do not count."""
    vocab: Mapping[str, int] | list[tuple[str, float]] = content["model"]["vocab"]
    return max(vocab.values(), default=-1) if isinstance(vocab, Mapping) else len(vocab) - 1

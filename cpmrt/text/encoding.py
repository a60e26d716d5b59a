"""Encoding one text with the `tokenizers` library, however long it is, without keeping other threads from running."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cpmrt.errors import ContextLengthError

_FIX = "shorten the prompt or raise max_context"


def encode_freely(library: Any, text: str) -> Any:
    """Return the library's encoding of a text, without BOS and offsets.

    `library.encode` keeps the interpreter to itself until it is done, a second for a megabyte; this call does not.
    """
    return library.encode_batch_fast([text], add_special_tokens=False)[0]


@dataclass(frozen=True)
class PromptLimit:
    """The most tokens that a prompt may have, and so the most bytes: each token stands for `longest_token` at most."""

    num_tokens: int
    longest_token: int

    def check_bytes(self, num_bytes: int) -> None:
        """Raise ContextLengthError if a text of so many bytes cannot fit. Done first, as it costs nothing."""
        if num_bytes > self.num_tokens * self.longest_token:
            raise ContextLengthError(
                f"the prompt has {num_bytes} bytes",
                expected=f"at most {self.longest_token} for each of the {self.num_tokens} tokens of the context",
                fix=_FIX,
            )

    def check_tokens(self, count: int) -> None:
        """Raise ContextLengthError if there are too many tokens."""
        if count > self.num_tokens:
            raise ContextLengthError(
                "the prompt does not fit the context",
                expected=f"at most {self.num_tokens} tokens",
                actual=count,
                fix=_FIX,
            )


def longest_token(content: Mapping[str, Any]) -> int:
    """Return how many bytes the longest token of a tokenizer.json has as it is spelled there.

    Tokens of single bytes are spelled longer than they are, so that no text has more bytes for a token.
    """
    vocab: Mapping[str, int] | list[tuple[str, float]] = content["model"]["vocab"]
    texts: Iterable[str] = vocab if isinstance(vocab, Mapping) else (text for text, _ in vocab)
    added = [token["content"] for token in content.get("added_tokens") or ()]
    return max((len(text.encode("utf-8", "replace")) for text in (*texts, *added)), default=1)

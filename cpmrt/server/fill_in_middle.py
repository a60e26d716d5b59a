"""Prompts that ask a model for the text between a prefix and a suffix, written with the markers of its tokenizer.

The order is prefix, suffix, middle (Bavarian et al. 2022, arXiv 2207.14255), the one that code models are trained on
most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpmrt.server.errors import unsupported
from cpmrt.text import Tokenizer

_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # MiniCPM3 and 4, Qwen2.5
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # CodeLlama
)


@dataclass(frozen=True)
class FillMarkers:
    """The tokens in front of the prefix, of the suffix and of the text to be written: their texts and ids."""

    texts: tuple[str, str, str]
    ids: tuple[int, int, int]


def markers_of(tokenizer: Tokenizer) -> FillMarkers | None:
    """Return the markers that the tokenizer has as special tokens, None where it has none."""
    for texts in _FAMILIES:
        ids = [tokenizer.token_id(text) for text in texts]
        prefix, suffix, middle = ids
        if prefix is not None and suffix is not None and middle is not None and tokenizer.special_ids.issuperset(ids):
            return FillMarkers(texts, (prefix, suffix, middle))
    return None


def fill_prompt(
    tokenizer: Tokenizer | None, prefix: str, suffix: str, *, param: str, before: str = "", begun: str = ""
) -> list[int]:
    """Return the token ids of a prompt for the text between `prefix` and `suffix`.

    `before` is text of other files, which comes first; `begun` is what is written already of the text in between.
    Raises ApiError 400 naming the field `param` if the tokenizer has no such markers, RequestError as `encode` does.
    """
    markers = markers_of(tokenizer) if tokenizer is not None else None
    if tokenizer is None or markers is None:
        raise unsupported(param, "the tokenizer of this model has no tokens for filling in the middle")

    def plain(text: str) -> Sequence[int]:
        return tokenizer.encode_plain(text) if text else ()

    prefix_id, suffix_id, middle_id = markers.ids
    bos = tokenizer.encode("")
    around = [prefix_id, *plain(prefix), suffix_id, *plain(suffix)]
    return [*bos, *plain(before), *around, middle_id, *plain(begun)]

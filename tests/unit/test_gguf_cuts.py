"""Cuts of tokens into two others against a search in a set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpmrt.weights.gguf import cuts
from cpmrt.weights.gguf.cuts import likely_cuts


def expected(tokens: list[str]) -> list[tuple[str, int]]:
    known = set(tokens)
    return [
        (token, cut) for token in tokens for cut in range(1, len(token)) if {token[:cut], token[cut:]} <= known
    ]  # fmt: skip


@pytest.mark.parametrize("batch", [1, 3, 1 << 13])
@given(st.lists(st.one_of(st.text("ab", max_size=6), st.text(max_size=4)), unique=True, max_size=40))
def test_cuts_into_known_tokens(batch: int, tokens: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "_BATCH", batch)
        assert list(likely_cuts(tokens)) == expected(tokens)


def test_long_tokens_and_halves_of_characters() -> None:
    tokens = ["\ud800", "\U0010ffff", "\ud800\U0010ffff", "a" * 255, "a", "a" * 256, ""]
    assert list(likely_cuts(tokens)) == expected(tokens) == [("\ud800\U0010ffff", 1), ("a" * 256, 1), ("a" * 256, 255)]

"""Tokenising texts of any length: the ids are the library's, other threads run, and what cannot fit is not read."""

from __future__ import annotations

import threading
import time

import pytest
from tokenizers import Tokenizer as Library

from cpmrt.errors import ContextLengthError
from cpmrt.text import Tokenizer
from cpmrt.weights.model_folder import ModelFolder

TEXT = "def read_lines(path):\n    return [line for line in open(path)]  # äöü 你好\n" * 3000
PARTS = {"real": TEXT, "no spaces": "a" * 100_000, "nothing else": " " * 50_000 + "\n" * 50_000, "empty": ""}


@pytest.fixture(scope="module")
def folder():
    return ModelFolder.open(None).path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.open(folder)


@pytest.fixture(scope="module")
def library(folder):
    return Library.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("text", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_the_ids_are_those_of_the_library(tokenizer, library, text, add_special_tokens):
    expected = library.encode(text, add_special_tokens=add_special_tokens).ids
    assert tokenizer.encode(text, add_special_tokens=add_special_tokens) == expected


def test_other_threads_run_meanwhile(tokenizer):
    """While a long text is encoded, other threads wait 0.1 s at most. With `encode` of the library itself it was half a
    second, and is 0.03 s in its version 0.23.3."""
    longest = []
    while len(longest) < 4 and min(longest, default=1) > 0.1:
        thread = threading.Thread(target=tokenizer.encode, args=(TEXT * 4,))
        thread.start()
        gap, last = 0.0, time.perf_counter()
        while thread.is_alive():
            time.sleep(0.001)
            gap, last = max(gap, time.perf_counter() - last), time.perf_counter()
        longest.append(gap)
    assert min(longest) <= 0.1, longest


def test_a_text_with_too_many_tokens_is_refused_with_their_number(tokenizer):
    ids = tokenizer.encode("x = 1\n" * 100)
    assert tokenizer.encode("x = 1\n" * 100, max_tokens=len(ids)) == ids
    with pytest.raises(ContextLengthError, match=f"at most {len(ids) - 2} tokens, got {len(ids) - 1}"):
        tokenizer.encode("x = 1\n" * 100, max_tokens=len(ids) - 2)


def test_a_text_with_too_many_bytes_is_not_even_encoded(tokenizer, monkeypatch):
    longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
    (token,) = [token for token in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(token)) == longest][:1]
    text = tokenizer.token_bytes(token).decode() * 10
    assert len(tokenizer.encode(text, add_special_tokens=False, max_tokens=10)) <= 10, "the longest texts pass"
    monkeypatch.setattr(tokenizer, "_library", None)
    with pytest.raises(ContextLengthError, match="1000000 bytes"):
        tokenizer.encode("x" * 1_000_000, max_tokens=100)

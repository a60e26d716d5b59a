"""Tokenizers of every kind in which special tokens can hide, and real ones."""

from __future__ import annotations

import atexit
import tempfile
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from cpmrt.text import Tokenizer
from cpmrt.weights.hub import BUNDLED

DATA = Path(__file__).parents[1] / ".." / "shared" / "data"


def lowered() -> Library:
    """Return a tokenizer that looks for special tokens in normalised text: it finds <|IM_END|> and ＜|im_end|> too."""
    library = byte_level()
    library.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    library.add_special_tokens([AddedToken(text, normalized=True) for text in ("<|im_end|>", "<|im_start|>")])
    return library


def byte_level() -> Library:
    vocab = {"<s>": 0, "</s>": 1} | {char: 2 + i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = Library(models.BPE(vocab, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>", "</s>"])
    return library


def tags() -> Library:
    """Return a tokenizer in which the markers of thoughts are added tokens that are not special."""
    library = byte_level()
    library.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    library.add_tokens(["<think>", "</think>", "\n\n"])
    return library


def unigram() -> Library:
    """Return a tokenizer whose vocabulary would make the token <|im_end|> out of plain text."""
    singles = [(chr(code), -9.0) for code in range(32, 127)]
    vocab = [("<unk>", 0.0), ("<|im_end|>", -0.5), ("<|im_start|>", -0.5), ("\n", -5.0), ("im", -1.0), *singles]
    library = Library(models.Unigram(vocab, 0, False))
    library.decoder = decoders.Fuse()
    library.add_special_tokens(["<unk>", "<|im_end|>", "<|im_start|>"])
    return library


def merging() -> Library:
    """Return a tokenizer whose merges would make the token <|im_end|> out of plain text.

    So would its rule that a text in the vocabulary is one token (`ignore_merges`).
    """
    pieces = ["<|", "im", "_", "end", "|>"]
    merges = [("<", "|"), ("i", "m"), ("e", "n"), ("en", "d"), ("|", ">"), ("<|", "im"), ("<|im", "_"), ("end", "|>"),
              ("<|im_", "end|>")]  # fmt: skip
    singles = [chr(code) for code in range(32, 127)] + ["\n"]
    made = ["".join(pair) for pair in merges]
    vocab = {text: i for i, text in enumerate(dict.fromkeys([*singles, *pieces, *made, "<|im_start|>"]))}
    library = Library(models.BPE(vocab, merges, ignore_merges=True))
    library.decoder = decoders.Fuse()
    library.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    return library


MADE = {"lowered": lowered, "tags": tags, "unigram": unigram, "merging": merging}


@cache
def open_tokenizer(name: str) -> Tokenizer:
    return Tokenizer.open(tokenizer_folder(name))


_KEPT = tempfile.TemporaryDirectory()
"""Holds the folders, until the process ends."""
atexit.register(_KEPT.cleanup)


@cache
def tokenizer_folder(name: str) -> Path:
    """Return the folder of a tokenizer: "bundled", "minicpm3" (skip the test if it is absent) or one of MADE."""
    if name == "bundled":
        return BUNDLED
    folder = Path(_KEPT.name) / name
    folder.mkdir(exist_ok=True)
    if name == "minicpm3":
        if not (DATA / "minicpm3_tokenizer.json").exists():
            pytest.skip("the real tokenizer is not there")
        (folder / "tokenizer.json").write_bytes((DATA / "minicpm3_tokenizer.json").read_bytes())
        (folder / "tokenizer_config.json").write_bytes((DATA / "minicpm4_tokenizer_config.json").read_bytes())
    else:
        MADE[name]().save(str(folder / "tokenizer.json"))
    return folder

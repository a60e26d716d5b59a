"""Tokenizers to write GGUF files from, and texts on which token ids are compared."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / ".." / "shared" / "data"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def texts(special: Sequence[str] = (), count: int = 1000, seed: int = 0) -> Iterator[str]:
    """Yield texts made of pieces of this project's files, other scripts, spaces and signs, some with special tokens."""
    source = "".join(path.read_text() for path in (ROOT / "README.md", ROOT / "tests" / "drawing.py"))
    others = "长文本，中文。日本語のテキスト  한국어\tРусский — naïve café ﬁ x² ½ ٣ "
    others += "😀👩\u200d👩\u200d👧 e\u0301 \u00a0\u3000 "
    others += "12345678.90 don't I'LL\r\n\n\n"
    chance = random.Random(seed)
    for _ in range(count):
        pieces = []
        for _ in range(chance.randrange(1, 6)):
            text = source if chance.random() < 0.6 else others
            start = chance.randrange(len(text))
            pieces.append(text[start : start + chance.randrange(1, 40)])
            if special and chance.random() < 0.3:
                pieces.append(chance.choice(special))
        yield "".join(pieces)


def trained(pattern: Sequence[str], *, ignore_merges: bool = False, normalizer: Any = None) -> Library:
    """Return a byte-level tokenizer trained on this project's texts; `pattern` splits texts as in a tokenizer.json."""
    library = Library(models.BPE(ignore_merges=ignore_merges))
    splits = [pre_tokenizers.Split(Regex(one), "isolated") for one in pattern]
    library.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=not splits)])
    library.decoder = decoders.ByteLevel()
    library.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(texts(count=1000, seed=5), trainer)
    library.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    library.add_tokens([AddedToken("<think>", normalized=False)])
    return library


SPLITTERS = {
    "gpt-2": {"pattern": ()},
    "llama-bpe": {"pattern": (LLAMA3,), "ignore_merges": True},
    "qwen2": {"pattern": (LLAMA3.replace("{1,3}", ""),), "normalizer": normalizers.NFC()},
    "minicpm5": {"pattern": (r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+")), "ignore_merges": True},
    "smollm": {"pattern": (r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")},
}

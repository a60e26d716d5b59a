"""Trains the byte-fallback BPE tokenizer and turns the corpus into token files.

The vocabulary follows the MiniCPM layout: <unk>, <s>, </s>, the ChatML marks, 256 byte tokens, then pieces.
Spaces are stored as '\u2581' with no dummy prefix, so that text comes back exactly as it went in.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_end|>", "<|im_start|>")
BOS_ID, EOS_ID, IM_END_ID = 1, 2, 3
SPACE_MARK = "\u2581"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# A line break with the indentation after it, a run of spaces, a word with one leading space or underscore,
# a run of punctuation, a single digit, other white space. Text that matches nothing stays a piece of its own.
PIECE_PATTERN = (
    rf"\n+{SPACE_MARK}*|{SPACE_MARK}{SPACE_MARK}+|{SPACE_MARK}?_?\p{{L}}+"
    rf"|{SPACE_MARK}?[^\s\p{{L}}\p{{N}}{SPACE_MARK}]+|{SPACE_MARK}?\p{{N}}|\s|{SPACE_MARK}"
)
ALPHABET_SIZE = 120
TRAINING_BYTES = 48_000_000
ENCODE_BATCH = 2000


def byte_tokens() -> list[str]:
    """Returns the 256 fallback tokens, in byte order."""
    return [f"<0x{byte:02X}>" for byte in range(256)]


def with_text_rules(tokenizer: Tokenizer) -> Tokenizer:
    """Sets the normalizer and the splitting that training and use share."""
    tokenizer.normalizer = normalizers.Replace(" ", SPACE_MARK)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE_PATTERN), "isolated")
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a tokenizer of exactly `vocab_size` entries (fewer only where the text is too small)."""
    reserved = [*SPECIAL_TOKENS, *byte_tokens()]
    learner = with_text_rules(Tokenizer(models.BPE()))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(reserved), limit_alphabet=ALPHABET_SIZE, show_progress=False
    )
    learner.train_from_iterator(texts, trainer)
    learnt = json.loads(learner.to_str())["model"]
    pieces = sorted(learnt["vocab"], key=learnt["vocab"].__getitem__)
    vocab = {piece: index for index, piece in enumerate([*reserved, *pieces])}
    merges = [tuple(pair) for pair in learnt["merges"]]
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    return finished_tokenizer(model)


def finished_tokenizer(model: models.BPE) -> Tokenizer:
    """Completes the tokenizer for export: special tokens, <s> in front, a decoder that undoes the encoding."""
    tokenizer = with_text_rules(Tokenizer(model))
    marks = [AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS]
    tokenizer.add_special_tokens(marks)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS_ID)]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def tokenizer_config(max_length: int) -> dict[str, object]:
    """Returns the contents of `tokenizer_config.json`."""
    marks = {
        str(index): {"content": token, "special": True, "normalized": False, "single_word": False,
                     "lstrip": False, "rstrip": False}
        for index, token in enumerate(SPECIAL_TOKENS)
    }  # fmt: skip
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": marks,
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "unk_token": "<unk>",
        "pad_token": "</s>",
        "additional_special_tokens": ["<|im_end|>", "<|im_start|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }


def check_round_trip(tokenizer: Tokenizer, seed: int, count: int = 3000) -> None:
    """Raises ValueError if any of many random strings does not decode to itself after encoding."""
    rng = random.Random(seed)
    alphabet = [*"abcXYZ019 \t\n\r_-.,()[]{}'\"\\#=:<>|/\x00é你好😀", "    ", "\r\n", "\n\n    "]
    samples = ["".join(rng.choices(alphabet, k=rng.randint(1, 60))) for _ in range(count)]
    samples += ["".join(chr(rng.randint(1, 0xD7FF)) for _ in range(20)) for _ in range(count)]
    for sample in samples:
        # A space mark in a text decodes to a space: the only text that does not come back.
        sample = sample.replace(SPACE_MARK, "")
        ids = tokenizer.encode(sample, add_special_tokens=False).ids
        if tokenizer.decode(ids, skip_special_tokens=False) != sample or 0 in ids:
            raise ValueError(f"the tokenizer does not give back {sample!r}")


def stored_texts(path: Path) -> Iterator[str]:
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def tokenizer_sample(work: Path) -> Iterator[str]:
    """Yields evenly spread documents, about `TRAINING_BYTES` in all."""
    stride = max(1, (work / "train.jsonl").stat().st_size // TRAINING_BYTES)
    yield from islice(stored_texts(work / "train.jsonl"), 0, None, stride)


def encode_file(tokenizer: Tokenizer, source: Path, target: Path) -> dict[str, int]:
    """Writes documents as uint16 tokens, each between <s> and </s>, and returns their sizes."""
    texts = stored_texts(source)
    tokens = size = documents = 0
    with open(target, "wb") as output:
        while batch := list(islice(texts, ENCODE_BATCH)):
            encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            for text, encoding in zip(batch, encodings, strict=True):
                ids = np.array([BOS_ID, *encoding.ids, EOS_ID], dtype=np.uint16)
                output.write(ids.tobytes())
                tokens += len(ids)
                size += len(text.encode())
            documents += len(batch)
    return {"documents": documents, "tokens": tokens, "bytes": size}

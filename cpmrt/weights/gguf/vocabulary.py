"""Makes the tokenizer.json and tokenizer_config.json that a GGUF model would have as a Hugging Face folder.

A file has a list of tokens with a type each, and either SentencePiece's scores ("llama") or the merges of byte-level
BPE ("gpt2"); of the latter's way of cutting text into words it has only the name. If a file carries a whole
tokenizer.json, that is taken instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpmrt.dtypes import Array
from cpmrt.errors import CheckpointError, UnsupportedModelError, quoted
from cpmrt.weights.files import parse_object
from cpmrt.weights.gguf.cuts import likely_cuts
from cpmrt.weights.gguf.header import Value
from cpmrt.weights.gguf.word_patterns import word_splitter

PREFIX = "tokenizer.ggml."
MODEL, TOKENS, TYPES, SCORES, MERGES = (
    PREFIX + name for name in ("model", "tokens", "token_type", "scores", "merges")
)
WHOLE = "tokenizer.huggingface.json"
TEMPLATE, TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"
MAX_TOKENS = 1 << 20
"""The most tokens of a vocabulary: each may become an object of a hundred characters. Models have at most a quarter."""
MAX_PIECE_CHARACTERS = 256
"""The longest piece that is merged from others: all its cuts are looked up. SentencePiece makes none over 16."""
MAX_MERGES = 1 << 20
"""The most pairs of pieces that make a token. MiniCPM3's vocabulary of 73,440 tokens has 104,297 of them; in one of all
parts of some text, every cut of every token is such a pair."""
_SPACE = "\u2581"
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


class TokenType(IntEnum):
    """The purpose of a token, by the format's numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file and their types; `path` is for messages."""

    path: Path
    metadata: Mapping[str, Value]
    tokens: list[str]
    types: NDArray[np.int64]

    @classmethod
    def of(cls, metadata: Mapping[str, Value], path: Path) -> Vocabulary:
        """Return the vocabulary of a file, checked. Raises CheckpointError."""
        tokens = metadata.get(TOKENS)
        if not isinstance(tokens, list) or not tokens:
            raise CheckpointError(f"{path}: key {quoted(TOKENS)}", expected="a list of tokens", actual=quoted(tokens))
        if len(tokens) > MAX_TOKENS:
            raise CheckpointError(
                f"{path}: key {quoted(TOKENS)}", expected=f"at most {MAX_TOKENS} tokens", actual=len(tokens)
            )
        types = metadata.get(TYPES)
        if types is None:
            return cls(path, metadata, tokens, np.full(len(tokens), TokenType.NORMAL, np.int64))
        numbers = _numbers(types, len(tokens), f"{path}: key {quoted(TYPES)}").astype(np.int64)
        wrong = numbers[(numbers < min(TokenType)) | (numbers > max(TokenType))]
        if wrong.size:
            raise CheckpointError(f"{path}: key {quoted(TYPES)}", expected="types from 1 to 6", actual=int(wrong[0]))
        return cls(path, metadata, tokens, numbers)

    def ids(self, *types: TokenType) -> list[int]:
        """Return the ids of all tokens of these types."""
        found: list[int] = np.flatnonzero(np.isin(self.types, types)).tolist()
        return found

    def mapping(self) -> dict[str, int]:
        """Return the id of each used token by its text; of two tokens with the same text that of the first."""
        used = np.flatnonzero(self.types != TokenType.UNUSED).tolist()
        return {self.tokens[token_id]: token_id for token_id in reversed(used)}

    def named(self, name: str) -> str | None:
        """Return the token that the file names as its "bos", "eos", ...; None where it names none."""
        key = f"{PREFIX}{name}_token_id"
        token_id = self.metadata.get(key)
        if token_id is None:
            return None
        if type(token_id) is not int or not 0 <= token_id < len(self.tokens):
            expected = f"a token id in [0, {len(self.tokens)})"
            raise CheckpointError(f"{self.path}: key {quoted(key)}", expected=expected, actual=quoted(token_id))
        return self.tokens[token_id]

    def text(self, name: str) -> str | None:
        """Return the string of a key of the tokenizer (`name` without `PREFIX`); None where the file lacks it."""
        value = self.metadata.get(PREFIX + name)
        if value is not None and not isinstance(value, str):
            key = quoted(PREFIX + name)
            raise CheckpointError(f"{self.path}: key {key}", expected="a string", actual=quoted(value))
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return the truth value of a key of the tokenizer (`name` without `PREFIX`); `default` if it is absent."""
        value = self.metadata.get(PREFIX + name, default)
        if not isinstance(value, bool):
            key = quoted(PREFIX + name)
            raise CheckpointError(f"{self.path}: key {key}", expected="a truth value", actual=quoted(value))
        return value


def has_tokenizer(metadata: Mapping[str, Value]) -> bool:
    """Tell whether a file has a tokenizer at all."""
    return MODEL in metadata or WHOLE in metadata


def tokenizer_json(metadata: Mapping[str, Value], path: Path) -> dict[str, Any]:
    """Return the object of a tokenizer.json. Raises CheckpointError, UnsupportedModelError."""
    whole, kind = metadata.get(WHOLE), metadata.get(MODEL)
    if isinstance(whole, str):
        return parse_object(whole.encode(), f"{path}: key {quoted(WHOLE)}", unique_keys=True)
    if not isinstance(kind, str) or kind not in _MODELS:
        raise UnsupportedModelError(
            f"{path}: key {quoted(MODEL)}", expected=" | ".join(_MODELS), actual=quoted(kind)
        )
    vocabulary = Vocabulary.of(metadata, path)
    parts, special = _MODELS[kind](vocabulary), {TokenType.CONTROL, TokenType.UNKNOWN}
    added = [
        {
            "id": token_id, "content": vocabulary.tokens[token_id], "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": vocabulary.types[token_id] in special,
        }
        for token_id in sorted(set(vocabulary.ids(*special, TokenType.USER_DEFINED)) - parts.pieces)
        if vocabulary.tokens[token_id]
    ]  # fmt: skip
    plain = {"version": "1.0", "truncation": None, "padding": None, "post_processor": None, "added_tokens": added}
    return plain | parts.components


def tokenizer_config_json(metadata: Mapping[str, Value], path: Path) -> dict[str, Any]:
    """Return the object of a tokenizer_config.json: special tokens, BOS, chat template. Raises CheckpointError."""
    vocabulary = Vocabulary.of(metadata, path)
    named = {name: text for key, name in _NAMED.items() if (text := vocabulary.named(key))}
    adds_bos = vocabulary.text("model") == "llama" or vocabulary.text("pre") in ("llama-bpe", "llama3", "llama-v3")
    config: dict[str, Any] = {"add_bos_token": vocabulary.flag("add_bos_token", adds_bos) and "bos_token" in named}
    config |= named
    templates = dict(_templates(metadata, path))
    if templates.keys() - {"default"}:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    elif templates:
        config["chat_template"] = templates["default"]
    return config


def _templates(metadata: Mapping[str, Value], path: Path) -> Iterator[tuple[str, str]]:
    names = metadata.get(TEMPLATES, [])
    others = ((name, f"{TEMPLATE}.{name}") for name in _listed(names, TEMPLATES, path))
    for name, key in (("default", TEMPLATE), *others):
        text = metadata.get(key)
        if isinstance(text, str):
            yield name, text
        elif text is not None:
            raise CheckpointError(f"{path}: key {quoted(key)}", expected="a template", actual=quoted(text))


@dataclass(frozen=True)
class _Parts:
    """The components of a tokenizer.json, and the ids of the tokens that merging alone finds (`pieces`).

    These are not listed as added tokens.
    """

    components: dict[str, Any]
    pieces: set[int]


def _sentence_piece(vocabulary: Vocabulary) -> _Parts:
    """Return the parts of a tokenizer.json for a SentencePiece model of type BPE.

    The pieces that the model's users defined have score 0. As in tokenizers that Hugging Face converts, they are merged
    like other pieces, but before them. Tokens that were added to the model later have another score.
    """
    normalizers: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    if vocabulary.flag("add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    where = f"{vocabulary.path}: key {quoted(SCORES)}"
    scores = _numbers(vocabulary.metadata.get(SCORES), len(vocabulary.tokens), where)
    defined = (token_id for token_id in vocabulary.ids(TokenType.USER_DEFINED) if scores[token_id] == 0)
    pieces = {*vocabulary.ids(TokenType.NORMAL), *defined}
    model = {
        "type": "BPE", "dropout": None, "unk_token": vocabulary.named("unknown"), "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": bool(vocabulary.ids(TokenType.BYTE)),
        "ignore_merges": False, "vocab": vocabulary.mapping(), "merges": _merges_of_scores(vocabulary, pieces, scores),
    }  # fmt: skip
    components = {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }
    return _Parts(components, pieces)


def _merges_of_scores(vocabulary: Vocabulary, pieces: set[int], scores: Array) -> list[str] | list[list[str]]:
    """Return the pairs of pieces that make a token together, in SentencePiece's order of merging: by the token's score.

    Of several pairs of one token that with the lower ids comes first, as in the tokenizer.json files of these models. A
    pair is one string with a space between the pieces, since a hundred thousand of those are read faster; it is a list
    of two strings if any piece contains a space.
    """
    ids = {vocabulary.tokens[token_id]: token_id for token_id in pieces}
    longest = max((len(token) for token in ids), default=0)
    if longest > MAX_PIECE_CHARACTERS:
        raise CheckpointError(
            f"{vocabulary.path}: key {quoted(TOKENS)}: a piece", expected=f"at most {MAX_PIECE_CHARACTERS} characters",
            actual=longest,
        )  # fmt: skip
    find, ranks = ids.get, (-scores.astype(np.float64)).tolist()
    found = (
        (ranks[ids[token]], left, right)
        for token, cut in likely_cuts(list(ids))
        if (left := find(token[:cut])) is not None and (right := find(token[cut:])) is not None
    )
    pairs = sorted(islice(found, MAX_MERGES + 1))
    if len(pairs) > MAX_MERGES:
        raise CheckpointError(
            f"{vocabulary.path}: key {quoted(TOKENS)}: pairs of tokens that make a token",
            expected=f"at most {MAX_MERGES}", actual="more",
        )  # fmt: skip
    merges = ((vocabulary.tokens[left], vocabulary.tokens[right]) for _, left, right in pairs)
    if any(" " in token for token in ids):
        return [[left, right] for left, right in merges]
    return [f"{left} {right}" for left, right in merges]


def _byte_pairs(vocabulary: Vocabulary) -> _Parts:
    """Return the parts of a tokenizer.json for byte-level BPE."""
    where = f"{vocabulary.path}: key {quoted(PREFIX + 'pre')}"
    splitter = word_splitter(vocabulary.metadata.get(PREFIX + "pre", "default"), vocabulary.tokens, where)
    merges = _listed(vocabulary.metadata.get(MERGES), MERGES, vocabulary.path)
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": splitter.ignores_merges, "vocab": vocabulary.mapping(), "merges": merges,
    }  # fmt: skip
    components = {
        "normalizer": {"type": "NFC"} if splitter.composes else None,
        "pre_tokenizer": splitter.pre_tokenizer,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": model,
    }
    return _Parts(components, set())


_MODELS = {"llama": _sentence_piece, "gpt2": _byte_pairs}


def _numbers(value: Value | None, count: int, where: str) -> Array:
    """Return a value that must be `count` finite numbers, one a token. Raises CheckpointError for any other value."""
    if not isinstance(value, np.ndarray) or len(value) != count or value.dtype == np.bool_:
        actual = f"{len(value)} values" if isinstance(value, (np.ndarray, list)) else quoted(value)
        raise CheckpointError(where, expected=f"{count} numbers, one a token", actual=actual)
    if not np.isfinite(value).all():
        raise CheckpointError(where, expected="finite numbers", actual="NaN or infinity")
    return value


def _listed(value: Value | None, key: str, path: Path) -> Sequence[str]:
    if not isinstance(value, list):
        # The type of an empty list says nothing: it may have been written as a list of numbers.
        if isinstance(value, np.ndarray) and not value.size:
            return []
        raise CheckpointError(f"{path}: key {quoted(key)}", expected="a list of strings", actual=quoted(value))
    return value

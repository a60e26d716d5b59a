"""Makes the keys of a GGUF file from the tokenizer and the chat templates of a folder, as llama.cpp reads them.

A tokenizer that these keys cannot describe is also stored as a whole, in the key that the format has for that.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cpmrt.errors import UnsupportedModelError, listed
from cpmrt.quantization.gguf_file import KeyValue, Typed
from cpmrt.text import Tokenizer
from cpmrt.text.chat_template import read_templates
from cpmrt.weights.files import parse_object
from cpmrt.weights.gguf.config import END_NAMES, end_ids
from cpmrt.weights.gguf.header import Value
from cpmrt.weights.gguf.vocabulary import PREFIX, TEMPLATE, TEMPLATES, WHOLE, TokenType, tokenizer_json
from cpmrt.weights.gguf.word_patterns import name_of, patterns_of
from cpmrt.weights.model_files import is_there
from cpmrt.weights.model_folder import ModelFolder

_LOG = logging.getLogger(__name__)
_COMES_AS_A_WHOLE = (
    "%s: no key of GGUF says its %s: the file has the whole tokenizer as well, but llama.cpp may split text otherwise"
)
_ENDS_LEFT_OUT = "%s: tokens %s end an answer, but GGUF has only %d keys for ends: from the file they do not end it"
_OF_MODEL = ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
_OF_UNKNOWN = ("fuse_unk", "unk_token")
"""Fields of a tokenizer's model that matter only where a text can contain something that is no token."""


def tokenizer_keys(folder: ModelFolder) -> dict[str, KeyValue]:
    """Return the keys of the folder's tokenizer and chat template, with the tokens that other files add.

    Raises CheckpointError where they are malformed, UnsupportedModelError for a tokenizer that is not BPE.
    """
    path = folder.path / "tokenizer.json"
    if not is_there(path):
        return {}
    tokenizer = Tokenizer.open(folder.path, vocab_size=folder.config.vocab_size)
    whole = tokenizer.serialized()
    content: dict[str, Any] = parse_object(whole.encode(), str(path))
    if (kind := content["model"]["type"]) != "BPE":
        raise UnsupportedModelError(
            f"tokenizer of a GGUF file: {path}", expected="one of type BPE", actual=kind,
            fix="use the safetensors as they are",
        )  # fmt: skip
    vocabulary = _vocabulary_keys(content, folder.config.vocab_size)
    keys = vocabulary | _special_keys(tokenizer, folder) | _end_keys(tokenizer, folder, vocabulary)
    if unsaid := _unsaid(keys, content, tokenizer, folder.path):
        _LOG.warning(_COMES_AS_A_WHOLE, path, ", ".join(unsaid))
        keys[WHOLE] = whole
    return keys | _template_keys(folder.path)


def _vocabulary_keys(content: Mapping[str, Any], rows: int) -> dict[str, KeyValue]:
    """Return the keys of tokens, types, and merges or scores; rows of the embedding without a token are unused tokens.
    """
    model = content["model"]
    texts = {token_id: text for text, token_id in model["vocab"].items()}
    types = dict.fromkeys(texts, TokenType.NORMAL)
    is_pieces = model.get("byte_fallback", False)
    if is_pieces:
        types |= {token_id: TokenType.BYTE for token_id, text in texts.items() if text.startswith("<0x")}
    for token in content["added_tokens"]:
        texts[token["id"]] = token["content"]
        types[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        if token["content"] == model.get("unk_token"):
            types[token["id"]] = TokenType.UNKNOWN
    count = max(rows, max(texts) + 1)
    tokens = [texts.get(token_id, f"[PAD{token_id}]") for token_id in range(count)]
    keys: dict[str, KeyValue] = {
        "model": "llama" if is_pieces else "gpt2",
        "pre": "default" if is_pieces else name_of(content) or "default",
        "tokens": tokens,
        "token_type": Typed("i32", [types.get(token_id, TokenType.UNUSED) for token_id in range(count)]),
    }
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    if is_pieces:
        keys["scores"] = Typed("f32", _scores(merges, tokens))
        keys["add_space_prefix"] = "Prepend" in str(content.get("normalizer"))
    else:
        keys["merges"] = merges
    return {PREFIX + name: value for name, value in keys.items()}


def _scores(merges: Sequence[str], tokens: Sequence[str]) -> list[float]:
    """Return the score of each token: the earlier it is merged the higher, the lowest for tokens that never are."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    return [-float(ranks.get(token, len(merges))) - 1.0 for token in tokens]


def _special_keys(tokenizer: Tokenizer, folder: ModelFolder) -> dict[str, KeyValue]:
    """Return the keys of BOS (the tokenizer's, else that of config.json), of its being added, and of the unknown token.
    """
    starts = (tokenizer.bos_token_id, *_special((folder.config.bos_token_id,), tokenizer))
    bos = next((token_id for token_id in starts if token_id is not None), None)
    keys: dict[str, KeyValue] = {"add_bos_token": tokenizer.encode("a")[:1] == [bos] and bos is not None}
    if bos is not None:
        keys["bos_token_id"] = Typed("u32", bos)
    unknown = tokenizer.token_id("<unk>")
    if unknown is not None:
        keys["unknown_token_id"] = Typed("u32", unknown)
    return {PREFIX + name: value for name, value in keys.items()}


def _end_keys(tokenizer: Tokenizer, folder: ModelFolder, vocabulary: Mapping[str, KeyValue]) -> dict[str, KeyValue]:
    """Return the keys of the tokens that end an answer. EOS is that of the tokenizer, else of config.json.

    The two other keys go first to tokens that a reader would not recognise by their text. A warning names the tokens
    that neither a key nor their text tells.
    """
    ends = folder.config.eos_token_ids
    eos = (*tokenizer.eos_token_ids, *_special(ends, tokenizer))[:1]
    by_text = end_ids(_read(vocabulary), folder.path)
    others = sorted((token_id for token_id in ends if token_id not in eos), key=lambda token_id: token_id in by_text)
    names = END_NAMES[1:]
    if lost := [token_id for token_id in others[len(names) :] if token_id not in by_text]:
        _LOG.warning(_ENDS_LEFT_OUT, folder.path, listed([str(token_id) for token_id in lost]), len(END_NAMES))
    found = [*zip(END_NAMES, eos, strict=False), *zip(names, others, strict=False)]
    return {f"{PREFIX}{name}_token_id": Typed("u32", token_id) for name, token_id in found}


def _special(ids: Sequence[int | None], tokenizer: Tokenizer) -> list[int]:
    return [token_id for token_id in ids if token_id is not None and token_id in tokenizer.special_ids]


def _unsaid(
    keys: Mapping[str, KeyValue], content: Mapping[str, Any], tokenizer: Tokenizer, path: Path
) -> list[str]:
    """Return the names of the parts of a tokenizer.json that cannot be made again from the keys alone."""
    found = _read(keys)
    made = _compared(tokenizer_json(found, path))
    unsaid = [name for name, part in _compared(content).items() if part != made[name]]
    front = [found[f"{PREFIX}bos_token_id"]] if found[f"{PREFIX}add_bos_token"] else []
    if tokenizer.encode("a") != [*front, *tokenizer.encode("a", add_special_tokens=False)]:
        unsaid.append("post_processor")
    return unsaid


def _compared(content: Mapping[str, Any]) -> dict[str, object]:
    """Return the parts of a tokenizer.json for a comparison, without the fields that make no difference."""
    from tokenizers.pre_tokenizers import ByteLevel  # imported here: `cpmrt convert --help` stays quick

    normalizer, decoder, model = content["normalizer"], content["decoder"], content["model"]
    knows_bytes = model["vocab"].keys() >= set(ByteLevel.alphabet())
    fields = _OF_MODEL if knows_bytes else _OF_MODEL + _OF_UNKNOWN
    # Without a normalizer it makes no difference whether an added token is looked for in normalised text.
    flags = ("id", "content", "special", "single_word", "lstrip", "rstrip", *(["normalized"] if normalizer else []))
    return {
        "normalizer": normalizer,
        "pre_tokenizer": patterns_of(content) or content["pre_tokenizer"],
        "merges": [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]],
        "model": [model[name] or None for name in fields],
        "added_tokens": [[token[name] for name in flags] for token in content["added_tokens"]],
        # The settings of a ByteLevel decoder make no difference: they are for encoding.
        "decoder": "ByteLevel" if decoder and decoder["type"] == "ByteLevel" else decoder,
    }


def _read(keys: Mapping[str, KeyValue]) -> dict[str, Value]:
    """Return the values of `keys` as a reader of the file will get them."""
    return {key: _read_one(value) for key, value in keys.items()}


def _read_one(value: KeyValue) -> Value:
    if not isinstance(value, Typed):
        return value if isinstance(value, (str, bool)) else list(value)
    return value.value if isinstance(value.value, (int, float)) else np.array(value.value)


def _template_keys(folder: Path) -> dict[str, KeyValue]:
    """Return the keys of the chat templates of a folder."""
    named, _ = read_templates(folder) or ({}, folder)
    keys: dict[str, KeyValue] = {
        TEMPLATE if name == "default" else f"{TEMPLATE}.{name}": text for name, text in named.items()
    }
    others = [name for name in named if name != "default"]
    return keys | ({TEMPLATES: others} if others else {})

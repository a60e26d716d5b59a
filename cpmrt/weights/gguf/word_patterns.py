"""The ways in which byte-level BPE tokenizers of GGUF files cut text into words: a row for each `tokenizer.ggml.pre`.

Source: the tokenizer.json of the models that the names stand for, and llama.cpp, which defines the names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cpmrt.errors import UnsupportedModelError, quoted

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The pattern of GPT-4 and of its descendants, which differ in how many digits make a word.
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_THREE_DIGITS = r"\p{N}{1,3}"
_SIGN_AND_LETTERS = re.compile(r"[!-&(-/:-@\[-`{-~][A-Za-z]{2,}")


@dataclass(frozen=True)
class WordSplitter:
    """A way of cutting text into words: the regular expressions `patterns`, applied one after another.

    `ignores_merges`: a word that is a token as a whole needs no merges. `composes`: the text is first composed
    (Unicode's NFC).
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    composes: bool = False

    @property
    def pre_tokenizer(self) -> dict[str, Any]:
        """The component `pre_tokenizer` of a tokenizer.json."""
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        return {"type": "Sequence", "pretokenizers": [*splits, to_bytes]}


_LLAMA3 = WordSplitter((_GPT4.format(digits=_THREE_DIGITS),), ignores_merges=True)
_SPLITTERS = {
    "default": WordSplitter((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": WordSplitter((_GPT2,)),
    "gpt2": WordSplitter((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "minicpm5": WordSplitter((_THREE_DIGITS, _GPT2), ignores_merges=True),
    "qwen2": WordSplitter((_GPT4.format(digits=r"\p{N}"),), composes=True),
    "smollm": WordSplitter((r"\p{N}", _GPT2)),
}
_MINICPM5_JOINED = WordSplitter((_THREE_DIGITS, _GPT4.format(digits=r"\p{N}+")), ignores_merges=True)


def word_splitter(name: object, tokens: Sequence[str], where: str) -> WordSplitter:
    """Return the row of a `tokenizer.ggml.pre`; `where` names the key in errors. Raises UnsupportedModelError.

    Two tokenizers are called minicpm5: after the digits one cuts as GPT-2 does, the other as GPT-4 does. Only the
    latter's words can be a sign with letters, such as "(self", so such a token in the vocabulary tells it.
    """
    if not isinstance(name, str) or name not in _SPLITTERS:
        raise UnsupportedModelError(
            f"{where}: this way of splitting text is not known", expected=" | ".join(_SPLITTERS), actual=quoted(name),
            fix="use the safetensors files of the model, whose tokenizer.json says it",
        )  # fmt: skip
    if name == "minicpm5" and any(_SIGN_AND_LETTERS.fullmatch(token) for token in tokens):
        return _MINICPM5_JOINED
    return _SPLITTERS[name]


def name_of(tokenizer_json: Mapping[str, Any]) -> str | None:
    """Return GGUF's name for the way in which a tokenizer.json cuts text into words; None if it has none."""
    patterns, ignores_merges = patterns_of(tokenizer_json), bool(tokenizer_json["model"].get("ignore_merges"))
    for name, row in (*_SPLITTERS.items(), ("minicpm5", _MINICPM5_JOINED)):
        if (patterns, ignores_merges) == (row.patterns, row.ignores_merges):
            return name
    return None


def patterns_of(tokenizer_json: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the patterns by which a tokenizer.json cuts text; None if it cuts in a way that no `WordSplitter` can."""
    splitter = tokenizer_json.get("pre_tokenizer") or {}
    parts = splitter.get("pretokenizers") or [splitter]
    if not all(_is_plain(part) for part in parts):
        return None
    return tuple(part["pattern"]["Regex"] if part["type"] == "Split" else _GPT2 for part in parts if _cuts(part))


def _is_plain(part: Mapping[str, Any]) -> bool:
    """Tell whether a component is of a kind that `WordSplitter.pre_tokenizer` has."""
    if part.get("type") == "Split":
        return part["behavior"] == "Isolated" and not part.get("invert") and "Regex" in part["pattern"]
    return part.get("type") == "ByteLevel" and not part.get("add_prefix_space", True)


def _cuts(part: Mapping[str, Any]) -> bool:
    return part["type"] == "Split" or bool(part.get("use_regex", True))

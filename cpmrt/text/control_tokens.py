"""Encodes prompts in which only the template's own control tokens, such as <|im_end|>, count as tokens.

The `tokenizers` library finds added tokens in a text wherever they are written. A text in which some of them are to be
plain text is therefore encoded by a second tokenizer, made when it is first needed. There the control tokens have
other, unguessable names, and the vocabulary lacks their known names. Everything else is the same, so that all other
text gets the ids that it always gets.
"""

from __future__ import annotations

import json
import re
import secrets
from functools import cached_property
from typing import Any

from cpmrt.errors import CheckpointError
from cpmrt.text.encoding import encode_freely
from cpmrt.text.marks import MarkedText, any_of

_TAG = re.compile(r"</?[^\s<>]+>?")


class ControlTokens:
    """The special tokens of a `tokenizers.Tokenizer`, and its other added tokens that are written as tags (<think>).

    `texts` are their spellings. Tokens that count as whole words only (`single_word`) are left out, as it depends on
    the neighbouring characters whether they are tokens.
    """

    def __init__(self, library: Any):
        self._library = library
        self._ids: dict[str, int] = {
            token.content: token_id
            for token_id, token in library.get_added_tokens_decoder().items()
            if (token.special or _TAG.fullmatch(token.content)) and token.content.strip() and not token.single_word
        }
        self.texts = frozenset(self._ids)
        self._pattern = re.compile(f"({any_of(self._ids).pattern})")

    def parts(self, text: str) -> list[str | int]:
        """Split a text into the ids of the control tokens in it and the strings between them."""
        return [self._ids.get(part, part) for part in self._pattern.split(text) if part]

    def encode(self, prompt: MarkedText) -> Any:
        """Return the library's encoding of a prompt without BOS; control tokens with marked characters are plain text.

        If no control token has one, it is the library's encoding of the whole text.
        """
        encoding = encode_freely(self._library, prompt.plain)
        if prompt.marks is None:
            return encoding
        known = set(self._ids.values())
        found = [token_id for token_id in encoding.ids if token_id in known]
        if found == [self._ids[text] for text in self._pattern.findall(prompt.text)]:
            return encoding
        parts = self._pattern.split(prompt.text)
        parts[::2] = [prompt.marks.removed(part) for part in parts[::2]]
        parts[1::2] = [self._aliases[part] for part in parts[1::2]]
        return encode_freely(self._renamed_library, "".join(parts))

    def prepare(self) -> None:
        """Make the second tokenizer now. That takes a second or two, in which no other Python thread runs."""
        _ = self._renamed_library

    @cached_property
    def _aliases(self) -> dict[str, str]:
        nonce = secrets.token_hex(16)
        return {text: f"\U000f0000{nonce}{index:x}\U000f0001" for index, text in enumerate(self._ids)}

    @cached_property
    def _renamed_library(self) -> Any:
        content, aliases = json.loads(self._library.to_str()), self._aliases
        for token in content["added_tokens"]:
            token["content"] = aliases.get(token["content"], token["content"])
        _rename_in_model(content["model"], aliases)
        renamed = type(self._library).from_str(json.dumps(content))
        for text, token_id in self._ids.items():
            if renamed.token_to_id(aliases[text]) != token_id:
                raise CheckpointError(f"tokenizer.json: token {text!r} cannot be told from plain text")
        return renamed


def _rename_in_model(model: dict[str, Any], aliases: dict[str, str]) -> None:
    """Rename tokens in a model's vocabulary (a dict, or Unigram's list), and drop merges that would form them."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {aliases.get(text, text): token_id for text, token_id in vocab.items()}
    else:
        model["vocab"] = [[aliases.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") in aliases:
        model["unk_token"] = aliases[model["unk_token"]]
    if "merges" in model:
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        model["merges"] = [pair for pair in pairs if "".join(pair) not in aliases]

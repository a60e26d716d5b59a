"""The bytes that each token stands for, so that text can be put together one token at a time.

The `tokenizers` library decodes whole sequences only. It is asked once per token for the text of two tokens, an anchor
and that token. The anchor is a token that decodes to exactly its own spelling; with it in front, a decoder that strips
the space at the start of a sequence strips nothing. A token that is not valid UTF-8 by itself is spelled in one of two
ways, `<0xE4>` (SentencePiece byte fallback) or in the alphabet of byte-level BPE (GPT-2, where each of 256 printable
characters stands for a byte).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"


class TokenBytes:
    """Looks up the bytes of tokens, special ones included, and keeps what the library has answered."""

    def __init__(self, library: Any):
        self._library = library
        self._anchor = self._find_anchor()
        self._anchor_text = self._decode(self._anchor)
        self.known: dict[int, bytes] = {}
        """Token id -> bytes that `inner` has returned."""

    def inner(self, token_id: int) -> bytes:
        """Return the bytes that the token adds after other text; b"" for an id without a token."""
        known = self.known.get(token_id)
        if known is None:
            known = self.known[token_id] = self._ask(token_id)
        return known

    def first(self, token_id: int) -> bytes:
        """Return the bytes that the token adds as the first of a sequence, where a decoder may strip its space."""
        inner, alone = self.inner(token_id), self._decode([token_id])
        text = inner.decode("utf-8", "replace")
        if not text.endswith(alone):
            return alone.encode()
        return inner[len(text[: len(text) - len(alone)].encode()) :] if alone != text else inner

    def join(self, token_ids: Iterable[int]) -> bytes:
        """Return the bytes of a sequence of tokens. Other threads can run between two tokens."""
        text, at_start = bytearray(), True
        for token_id in token_ids:
            inner = self.inner(token_id)
            text += self.first(token_id) if at_start else inner
            at_start = at_start and not inner
        return bytes(text)

    def _ask(self, token_id: int) -> bytes:
        token = self._library.id_to_token(token_id)
        if token is None:
            return b""
        text = self._decode([*self._anchor, token_id])[len(self._anchor_text) :]
        if _REPLACEMENT not in text:
            return text.encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        raw = bytes(_BYTE_OF[char] for char in token if char in _BYTE_OF)
        return raw if len(raw) == len(token) and raw.decode("utf-8", "replace") == text else text.encode()

    def _find_anchor(self) -> list[int]:
        for token_id in range(self._library.get_vocab_size()):
            token = self._library.id_to_token(token_id)
            if token is not None and token.isalnum() and self._decode([token_id]) == token:
                return [token_id]
        return []

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._library.decode(token_ids, skip_special_tokens=False))


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's map of characters to bytes: printable Latin-1 is itself, the other bytes are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()

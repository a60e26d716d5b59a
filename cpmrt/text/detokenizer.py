"""Token ids to text while they arrive: every character as soon as it is complete, none before."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from cpmrt.text.tokenizer import Tokenizer


class Detokenizer:
    """Text of one generated sequence, as tokens come; the cost of a token does not depend on those before it.

    All pieces together are what `tokenizer.decode(prompt + output)` adds to the prompt's text, special tokens
    skipped: the space in front of a first word is kept. Bytes that are no UTF-8 become U+FFFD once it is certain
    that they are none. A character that the prompt leaves unfinished belongs to the output. `shown_ids` are special
    tokens that are written out all the same.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), shown_ids: frozenset[int] = frozenset()):
        self._tokenizer, self._shown_ids = tokenizer, shown_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for token_id in reversed(prompt_ids):
            if len(tail) >= 3:  # an unfinished character has at most three bytes
                break
            tail = tokenizer.token_bytes(token_id) + tail
        self._at_start = not tail
        self._utf8.decode(tail)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; "" while a character is open. Raises RequestError on a negative id."""
        pieces: list[bytes] = []
        for token_id in token_ids:
            if token_id in self._shown_ids:
                pieces.append(self._tokenizer.written_bytes(token_id))
                continue
            pieces.append(self._tokenizer.token_bytes(token_id, first=self._at_start))
            self._at_start = self._at_start and not self._tokenizer.token_bytes(token_id)
        return self._utf8.decode(b"".join(pieces))

    def flush(self) -> str:
        """The rest after the last token: "" or one U+FFFD for a character that was never finished."""
        return self._utf8.decode(b"", final=True)

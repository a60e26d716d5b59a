"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cpmrt.executor import TokenLogprobs
from cpmrt.text import Tokenizer

_LOWEST = -9999.0
"""What the API writes for minus infinity, which JSON lacks."""


class LogprobWriter:
    """Writes the tokens of one request. End tokens are left out, as they are from the text."""

    def __init__(self, tokenizer: Tokenizer | None, end_ids: Iterable[int], count: int):
        self._tokenizer, self._end_ids, self._count = tokenizer, frozenset(end_ids), count
        self._entries: dict[int, tuple[str, list[int]]] = {}

    def chat(self, logprobs: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
        """Entries of `choices[].logprobs.content`."""
        return [
            {
                **self._chat_entry(entry.token_id, entry.logprob),
                "top_logprobs": [self._chat_entry(*pair) for pair in entry.top[: self._count]],
            }
            for entry in logprobs
            if entry.token_id not in self._end_ids
        ]

    def completion(self, logprobs: Iterable[TokenLogprobs], offset: int) -> dict[str, Any]:
        """`choices[].logprobs`: lists by token. `offset`: characters of the text before the first token."""
        kept = [entry for entry in logprobs if entry.token_id not in self._end_ids]
        tokens = [self._token(entry.token_id)[0] for entry in kept]
        offsets = [offset + sum(map(len, tokens[:index])) for index in range(len(tokens))]
        tops = [{self._token(token)[0]: _finite(lp) for token, lp in entry.top[: self._count]} for entry in kept]
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry.logprob) for entry in kept],
            "top_logprobs": tops if self._count else None,
            "text_offset": offsets,
        }

    def _chat_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self._token(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": raw}

    def _token(self, token_id: int) -> tuple[str, list[int]]:
        known = self._entries.get(token_id)
        if known is None:
            known = self._entries[token_id] = self._read(token_id)
        return known

    def _read(self, token_id: int) -> tuple[str, list[int]]:
        if self._tokenizer is None:
            return f"token_id:{token_id}", []
        raw = self._tokenizer.token_bytes(token_id)
        if not raw:
            raw = self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return raw.decode("utf-8", "replace"), list(raw)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)

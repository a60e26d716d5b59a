"""Log-probabilities in the two shapes of the API, written as JSON token by token, each at the same cost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from cpmrt.executor import TokenLogprobs
from cpmrt.text import Tokenizer
from cpmrt.text.streaming import Detokenizer

_LOWEST = -9999.0
"""The number that the API writes for minus infinity, which JSON lacks."""
_BLOCK = 256


class TokenText(NamedTuple):
    """A token as answers name it: its text as `json`, and its `entry` in a chat up to the log-probability.

    `special` is the text of a special token, which texts leave out; "" for any other.
    """

    json: str
    special: str
    entry: str


class TokenTexts:
    """The texts of tokens, each read once. Without a tokenizer they are numbers."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}

    def of(self, token_id: int) -> TokenText:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._read(token_id)
        return known

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> Detokenizer | None:
        """Return a detokenizer for the text behind these tokens, None without a tokenizer."""
        return Detokenizer(self._tokenizer, prompt_ids) if self._tokenizer is not None else None

    def _read(self, token_id: int) -> TokenText:
        text, raw, special = f"token_id:{token_id}", b"", ""
        if self._tokenizer is not None:
            raw = self._tokenizer.token_bytes(token_id) or self._tokenizer.written_bytes(token_id)
            text = raw.decode("utf-8", "replace")
            special = text if token_id in self._tokenizer.special_ids else ""
        written = json.dumps(text, ensure_ascii=False)
        return TokenText(written, special, f'{{"token":{written},"bytes":{json.dumps(list(raw))},"logprob":')


class ChoiceLogprobs(Protocol):
    """The log-probabilities of one choice."""

    def add(self, logprobs: Iterable[TokenLogprobs]) -> None: ...

    def take(self) -> list[str]:
        """Return the JSON of those added since the last call, in pieces of some hundred kilobytes at most."""


class _Entries:
    """JSON values, joined by commas, block by block as they come."""

    def __init__(self) -> None:
        self._blocks: list[str] = []
        self._last: list[str] = []

    def append(self, entry: str) -> None:
        self._last.append(entry)
        if len(self._last) == _BLOCK:
            self._close()

    def take(self) -> list[str]:
        if self._last:
            self._close()
        blocks, self._blocks = self._blocks, []
        return blocks

    def _close(self) -> None:
        self._blocks += ["," * bool(self._blocks) + ",".join(self._last)]
        self._last.clear()


class ChatLogprobs:
    """Writes the log-probabilities of a chat's choice. `count` is the number of most likely tokens that were asked for.

    Like the text they leave out the end tokens, `end_ids`.
    """

    def __init__(self, texts: TokenTexts, end_ids: frozenset[int], count: int):
        self._texts, self._end_ids, self._count = texts, end_ids, count
        self._entries = _Entries()

    def add(self, logprobs: Iterable[TokenLogprobs]) -> None:
        for entry in logprobs:
            if entry.token_id not in self._end_ids:
                top = ",".join([self._entry(*pair) + "}" for pair in entry.top[: self._count]])
                self._entries.append(f'{self._entry(entry.token_id, entry.logprob)},"top_logprobs":[{top}]}}')

    def take(self) -> list[str]:
        return ['{"content":[', *self._entries.take(), '],"refusal":null}']

    def _entry(self, token_id: int, logprob: float) -> str:
        return self._texts.of(token_id).entry + _number(logprob)


class CompletionLogprobs:
    """Writes the log-probabilities of a completion's choice; the first arguments as for `ChatLogprobs`.

    The choice follows `prompt_ids`; `echo` is their text if the choice begins with it.
    """

    def __init__(
        self, texts: TokenTexts, end_ids: frozenset[int], count: int, prompt_ids: Sequence[int] = (), echo: str = ""
    ):
        self._texts, self._end_ids, self._count = texts, end_ids, count
        self._prompt_ids, self._echo = prompt_ids, echo
        self._offset = len(echo)
        """The number of characters of the choice's text so far."""
        self._detokenizer = texts.detokenizer(prompt_ids)
        self._tokens, self._numbers, self._tops, self._offsets = (_Entries() for _ in range(4))

    def add(self, logprobs: Iterable[TokenLogprobs]) -> None:
        for entry in logprobs:
            if entry.token_id not in self._end_ids:
                self._append(entry.token_id, _number(entry.logprob), self._top(entry) if self._count else "")

    def add_prompt(self, logprobs: Iterable[TokenLogprobs]) -> None:
        """Add the tokens of the prompt. Nothing comes before the first, so it has no log-probability."""
        following, self._detokenizer = self._detokenizer, self._texts.detokenizer()
        self._offset = 0
        self._append(self._prompt_ids[0], "null", "null")
        self.add(logprobs)
        self._offset, self._detokenizer = len(self._echo), following

    def take(self) -> list[str]:
        tops = ["[", *self._tops.take(), "]"] if self._count else ["null"]
        return [
            '{"tokens":[', *self._tokens.take(), '],"token_logprobs":[', *self._numbers.take(),
            '],"top_logprobs":', *tops, ',"text_offset":[', *self._offsets.take(), "]}",
        ]  # fmt: skip

    def _append(self, token_id: int, number: str, top: str) -> None:
        text = self._texts.of(token_id)
        self._tokens.append(text.json)
        self._numbers.append(number)
        self._offsets.append(str(self._offset))
        self._offset += self._added(token_id, text.special)
        if self._count:
            self._tops.append(top)

    def _added(self, token_id: int, special: str) -> int:
        """Return how many characters a token adds; a special token adds some only if the echoed prompt has its text."""
        if special:
            return len(special) if self._echo.startswith(special, self._offset) else 0
        return len(self._detokenizer.push((token_id,))) if self._detokenizer is not None else 0

    def _top(self, entry: TokenLogprobs) -> str:
        # The sampled token is always included. Tokens of the same text are one key, and the likeliest of them stays.
        tokens = [(entry.token_id, entry.logprob), *reversed(entry.top[: self._count])]
        best = {self._texts.of(token).json: _number(logprob) for token, logprob in tokens}
        return "{" + ",".join([f"{text}:{number}" for text, number in best.items()]) + "}"


def _number(logprob: float) -> str:
    return float.__repr__(max(logprob, _LOWEST))

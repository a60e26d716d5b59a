"""Turns the engine's tokens into text: pieces as they come, up to a stop string, and the whole answer at the end."""

from __future__ import annotations

from dataclasses import dataclass

from cpmrt.engine import GenerationStats, Request
from cpmrt.executor import SlotResult, TokenLogprobs
from cpmrt.text import Detokenizer, StopStrings, Tokenizer
from cpmrt.tool_use.calls import Call


# Not frozen: that makes a dataclass take three times as long to construct, and there is one for each token.
@dataclass(slots=True)
class Piece:
    """The text and tokens that one step added. Text is held back while a character or a stop string is incomplete."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A finished generation. `text` ends before the stop string or end token; `token_ids` hold the end token too.

    `finish_reason` is "stop", "length", "loop" or "cancelled"; `logprobs`, one entry a token, are empty unless asked
    for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...]
    stats: GenerationStats
    others: tuple[Completion, ...] = ()
    """Further answers to the same prompt, where `SamplingParams.n` asked for more than one."""
    tool_calls: tuple[Call, ...] = ()
    """The calls in `text` of a chat that was given tools: each has a `name`, and `arguments`, a JSON object as text."""

    @property
    def choices(self) -> tuple[Completion, ...]:
        """All answers to the prompt, this one first."""
        return (self, *self.others)


class AnswerText:
    """Turns the results of one sequence into text, up to its first stop string.

    `shown_ids` are special tokens that the text keeps. Without a tokenizer all text is empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, request: Request, shown_ids: frozenset[int] = frozenset()):
        self._end_ids = request.stop_token_ids
        self._detokenizer = Detokenizer(tokenizer, request.prompt_ids, shown_ids) if tokenizer else None
        self._stop = StopStrings(request.stop)
        self.num_tokens = 0
        """The number of tokens of all pieces so far."""
        self.is_over = False
        """True after a stop string, which the last token of the last piece completed."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the text, None where none has."""
        return self._stop.hit

    def push(self, result: SlotResult) -> Piece:
        """Return a piece: the tokens of a result, up to one that completes a stop string, and the text to show now."""
        detokenizer, text, count = self._detokenizer, "", len(result.token_ids)
        if detokenizer is not None:
            for number, token in enumerate(result.token_ids, 1):
                if token in self._end_ids:
                    continue
                shown, self.is_over = self._stop.push(detokenizer.push((token,)))
                text += shown
                if self.is_over:
                    count = number
                    break
        self.num_tokens += count
        return Piece(text, result.token_ids[:count], result.logprobs[:count])

    def rest(self) -> str:
        """Return the text that was held back for a character or a stop string that never came."""
        if self._detokenizer is None:
            return ""
        text, _ = self._stop.push(self._detokenizer.flush())
        return text + self._stop.flush()

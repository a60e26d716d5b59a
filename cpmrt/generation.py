"""Text out of the engine's tokens: pieces as they come, the end at a stop string, the whole when it is done."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

from cpmrt.engine import Engine, GenerationStats, Request, Sequence
from cpmrt.executor import SlotResult, TokenLogprobs
from cpmrt.text import Detokenizer, StopStrings, Tokenizer


@dataclass(frozen=True)
class Piece:
    """The text and the tokens that one step added. The text lags while a character or a stop string is incomplete."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A finished generation. `text` ends before the stop string or end token; `token_ids` hold the end token too.

    `finish_reason` is "stop", "length" or "cancelled"; `logprobs` (one entry a token) are empty unless asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...]
    stats: GenerationStats


class AnswerText:
    """Turns the results of one sequence into text, and ends the sequence at its first stop string.

    `shown_ids` are special tokens that the text keeps. Without a tokenizer all text is empty.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer | None, sequence: Sequence, shown_ids: frozenset[int] = frozenset()
    ):
        request = sequence.request
        self._engine, self._sequence, self._end_ids = engine, sequence, request.stop_token_ids
        self._detokenizer = Detokenizer(tokenizer, request.prompt_ids, shown_ids) if tokenizer else None
        self._stop = StopStrings(request.stop)

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the text, None where none has."""
        return self._stop.hit

    def piece(self, result: SlotResult) -> Piece:
        """Return the tokens of a result and the text that may be shown now."""
        text = ""
        if self._detokenizer is not None:
            shown = [token for token in result.token_ids if token not in self._end_ids]
            text, is_over = self._stop.push(self._detokenizer.push(shown))
            if is_over:
                self._engine.stop(self._sequence)
        return Piece(text, result.token_ids, result.logprobs)

    def rest(self) -> Iterator[Piece]:
        """Yield the text held back for a character or a stop string that never came, if there is any."""
        if self._detokenizer is not None:
            text, is_over = self._stop.push(self._detokenizer.flush())
            text += "" if is_over else self._stop.flush()
            if text:
                yield Piece(text)


class TextStream(Iterator[Piece]):
    """Iterates over the pieces of one request; closing it (or leaving its `with` block) cancels the request."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, request: Request):
        self._engine, self._sequence = engine, engine.add(request)
        self._answer = AnswerText(engine, tokenizer, self._sequence)
        self._taken: list[Piece] = []
        self._pieces = self._run()

    def __next__(self) -> Piece:
        self._taken.append(next(self._pieces))
        return self._taken[-1]

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the request if it still runs. May be called again."""
        self._pieces.close()
        self._engine.finish(self._sequence, "cancelled")

    @property
    def completion(self) -> Completion:
        """Everything that has come so far; its reason is "cancelled" while the iteration has not ended."""
        return Completion(
            text="".join(piece.text for piece in self._taken),
            token_ids=tuple(token for piece in self._taken for token in piece.token_ids),
            finish_reason=self._sequence.finish_reason or "cancelled",
            logprobs=tuple(entry for piece in self._taken for entry in piece.logprobs),
            stats=self._sequence.stats,
        )

    def finish(self) -> Completion:
        """Run to the end and return the whole."""
        for _ in self:
            pass
        return self.completion

    def _run(self) -> Generator[Piece, None, None]:
        for result in self._engine.stream(self._sequence):
            yield self._answer.piece(result)
        yield from self._answer.rest()

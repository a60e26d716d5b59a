"""From the engine's tokens to text: pieces as they come, stop strings, and the whole at the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cpmrt.engine import Engine, GenerationStats, Request
from cpmrt.executor import SlotResult, TokenLogprobs
from cpmrt.text import Detokenizer, StopStrings, Tokenizer


@dataclass(frozen=True)
class Piece:
    """What one step added. Text lags behind tokens while a character or a possible stop string is incomplete."""

    text: str
    token_ids: tuple[int, ...]
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
    """The text of one request, out of the engine's results as they come; with `shown_ids` among special tokens."""

    def __init__(self, tokenizer: Tokenizer | None, request: Request, shown_ids: frozenset[int] = frozenset()):
        self._detokenizer = Detokenizer(tokenizer, request.prompt_ids, shown_ids) if tokenizer else None
        self._stop, self._end_ids = StopStrings(request.sampling.stop), request.stop_token_ids

    def push(self, result: SlotResult) -> tuple[str, bool]:
        """Text that may be shown now, and whether a stop string ended it."""
        if self._detokenizer is None:
            return "", False
        shown = [token for token in result.token_ids if token not in self._end_ids]
        return self._stop.push(self._detokenizer.push(shown))

    def flush(self) -> str:
        """Text held back for a character or a stop string that never came."""
        if self._detokenizer is None:
            return ""
        text, hit = self._stop.push(self._detokenizer.flush())
        return text if hit else text + self._stop.flush()


class TextStream(Iterator[Piece]):
    """Iterates over the pieces of one request; closing it (or leaving its `with` block) cancels the request."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, request: Request):
        self._engine, self._sequence = engine, engine.add(request)
        self._text = AnswerText(tokenizer, request)
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._pieces = self._run()

    def __next__(self) -> Piece:
        return next(self._pieces)

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the request if it still runs. May be called again."""
        self._pieces.close()  # type: ignore[attr-defined]
        self._engine.finish(self._sequence, "cancelled")

    @property
    def completion(self) -> Completion:
        """What has come so far; complete once the iteration has ended. "cancelled" while it has not."""
        return Completion(
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=self._sequence.finish_reason or "cancelled",
            logprobs=tuple(self._logprobs),
            stats=GenerationStats.of(self._sequence),
        )

    def finish(self) -> Completion:
        """Run to the end."""
        for _ in self:
            pass
        return self.completion

    def _run(self) -> Iterator[Piece]:
        for result in self._engine.stream(self._sequence):
            text, hit = self._text.push(result)
            if hit:
                self._engine.finish(self._sequence, "stop")
                # A sequence that ended by itself in this very step was still ended by its stop string.
                self._sequence.finish_reason = "stop"
            yield self._piece(text, result)
            if hit:
                return
        rest = self._text.flush()
        if rest:
            yield self._piece(rest, SlotResult())

    def _piece(self, text: str, result: SlotResult) -> Piece:
        self._texts.append(text)
        self._token_ids.extend(result.token_ids)
        self._logprobs.extend(result.logprobs)
        return Piece(text, result.token_ids, result.logprobs)

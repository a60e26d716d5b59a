"""The log-probabilities of the tokens of prompts, as `echo` with `logprobs` asks for them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpmrt import LLM
from cpmrt.dtypes import F32
from cpmrt.engine.checks import check_prompt
from cpmrt.executor import TokenLogprobs
from cpmrt.log_probabilities import checked_log_softmax
from cpmrt.server.token_logprobs import CompletionLogprobs
from cpmrt.sharing.jobs import Reading


@dataclass(frozen=True)
class ScoredPrompt:
    """A prompt, and the writers of the choices that begin with it. `count` most likely tokens are asked for.

    Raises RequestError for a prompt without tokens, ContextLengthError for one that does not fit.
    """

    token_ids: tuple[int, ...]
    count: int
    writers: Sequence[CompletionLogprobs]
    max_context: int

    def __post_init__(self) -> None:
        check_prompt(self.token_ids, self.max_context)


class PromptScores:
    """Gives the writers of prompts the log-probabilities of their tokens, one prompt after another (`PromptWork`)."""

    def __init__(self, llm: LLM, prompts: Sequence[ScoredPrompt]):
        self._llm, self._prompts = llm, prompts
        self._reading: Reading | None = None
        self._is_cancelled = False

    def run(self) -> None:
        """Score the prompts. Raises CpmrtError."""
        for prompt in self._prompts:
            self._reading = reading = Reading(len(prompt.token_ids), _Work(self._llm, prompt))
            if self._is_cancelled:  # looked at behind the reading, which `cancel` would end otherwise
                return
            self._llm.shared.run([reading])
            for writer in prompt.writers if reading.result is not None else ():
                writer.add_prompt(reading.result)

    def cancel(self) -> None:
        """Have `run` end soon, with nothing more given."""
        self._is_cancelled = True
        if self._reading is not None:
            self._llm.shared.cancel([self._reading])


class _Work:
    """The work on one prompt, which the engine's thread does chunk by chunk (`Reading.work`)."""

    def __init__(self, llm: LLM, prompt: ScoredPrompt):
        self._executor, self._prompt = llm.executor, prompt

    def __call__(self, slot: int, block_table: tuple[int, ...]) -> Generator[None, None, list[TokenLogprobs]]:
        ids, entries = self._prompt.token_ids, list[TokenLogprobs]()
        for logits in self._executor.prompt_logits(slot, ids, block_table):
            position = len(entries) + 1
            following = ids[position : position + len(logits)]
            if following:  # nothing follows the last token
                entries += token_logprobs(logits[: len(following)], following, self._prompt.count, position)
            yield
        return entries


def token_logprobs(logits: F32, following: Sequence[int], count: int, position: int) -> list[TokenLogprobs]:
    """Return an entry with the `count` most likely tokens for each of the tokens that follow.

    `logits` have shape [T, V]; `position` is that of the first token that follows. Raises NonFiniteLogitsError.
    """
    logprobs = checked_log_softmax(logits, position)
    own = logprobs[np.arange(len(following)), following].tolist()
    best = _most_likely(logprobs, count)
    values = np.take_along_axis(logprobs, best, axis=-1).tolist()
    tops = [tuple(zip(*row, strict=True)) for row in zip(best.tolist(), values, strict=True)]
    return [TokenLogprobs(*entry) for entry in zip(following, own, tops, strict=True)]


def _most_likely(logprobs: F32, count: int) -> NDArray[np.int64]:
    """Return the ids of the `count` most likely tokens of each row, best first: int64 [T, count]."""
    if count <= 1:
        most: NDArray[np.int64] = logprobs.argmax(axis=-1, keepdims=True)
        return most[:, :count]
    best = np.argpartition(logprobs, -count, axis=-1)[:, -count:]
    order = np.argsort(-np.take_along_axis(logprobs, best, axis=-1), axis=-1, kind="stable")
    ordered: NDArray[np.int64] = np.take_along_axis(best, order, axis=-1)
    return ordered

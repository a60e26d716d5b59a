"""Answers whose keys and values are computed once more, as a prompt's, while there is nothing else to do.

Decode steps round a little differently than a prefill. So the next turn of a chat, whose prompt begins with the answer,
does not take over the keys and values that the answer's own steps have written (`docs/prefixes.md`). If they are
computed again before that turn comes, it need not wait for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cpmrt.config import Sampling
from cpmrt.engine import Engine, Request
from cpmrt.engine import Sequence as EngineSequence
from cpmrt.sharing.jobs import Generation

_MOST = 16
"""The most answers that are remembered at a time; older ones are computed when their next turn comes."""


class RemadeAnswers:
    """Remembers the answers that have ended, and makes the jobs that compute them as prompts, the newest first."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._ended = deque[tuple[tuple[int, ...], Sequence[int]]](maxlen=_MOST)
        """The prompts and answers of sequences that have ended, the newest last."""

    def note(self, seq: EngineSequence) -> None:
        """Remember a sequence that has ended, if its answer fills a page of its own."""
        prompt, full = seq.request.prompt_ids, self._full(seq.request.prompt_ids, seq.token_ids)
        has_room = full < self._engine.limits.max_context
        if self._engine.remakes_answers and seq.failure is None and full > len(prompt) and has_room:
            self._ended.append((prompt, seq.token_ids))

    def next(self) -> Generation | None:
        """Return a job that computes the newest answer, and forget that answer; None: there is none. For any thread."""
        try:
            prompt, answer = self._ended.pop()
        except IndexError:
            return None
        text = (*prompt, *answer)[: self._full(prompt, answer)]
        return Generation(Request(text, Sampling(), seed=0, stop_token_ids=(), max_new_tokens=1))

    def put_back(self, job: Generation) -> None:
        """Remember the answer of a job that was cancelled."""
        self._ended.append((job.request.prompt_ids, ()))

    def _full(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """Return the number of tokens in full pages."""
        page_size = self._engine.limits.page_size
        return (len(prompt) + len(answer)) // page_size * page_size

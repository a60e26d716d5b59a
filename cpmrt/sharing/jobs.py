"""What callers ask of a shared engine, and what comes back to them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Protocol

from cpmrt.engine import GenerationStats, Request
from cpmrt.engine import Sequence as EngineSequence
from cpmrt.engine.loan import Loan
from cpmrt.generation import AnswerText, Completion, Piece
from cpmrt.tool_use.calls import Schemas
from cpmrt.tool_use.finder import calls_in


@dataclass(frozen=True)
class Ended:
    """The end of a job. `reason` is that of the sequence, "done" (of a reading) or, with an `error`, "error".

    Those of sequences are "stop", "length", "loop" and "cancelled".
    Seconds are from the submission: in the queue, and to the first token (0 without one).
    """

    reason: str
    stats: GenerationStats = GenerationStats()
    queued_s: float = 0.0
    first_token_s: float = 0.0
    error: Exception | None = None
    stop_string: str | None = None
    """The stop string that ended the text."""


@dataclass(eq=False)
class Generation:
    """A request on its way through a shared engine, which fills in `receiver`, `sequence` and `text`.

    `shown_ids` are special tokens that its text keeps.
    """

    request: Request
    shown_ids: frozenset[int] = frozenset()
    schemas: Schemas | None = None
    """The schemas of the tools that it may call."""
    thought_end: str | None = None
    """The marker that ends the thought which its prompt has opened, in which nothing is a call."""
    pieces: list[Piece] = field(default_factory=list)
    """Those that its caller has read."""
    is_read: bool = False
    """Whether the caller has read its end too."""
    submitted_at: float = field(default_factory=perf_counter)
    receiver: Receiver = field(init=False, repr=False)
    sequence: EngineSequence = field(init=False)
    text: AnswerText = field(init=False, repr=False)

    def read(self, part: Piece | Ended) -> None:
        """Note that the caller has read this."""
        if isinstance(part, Piece):
            self.pieces.append(part)
        else:
            self.is_read = True

    def ended(self, error: Exception | None = None) -> Ended:
        """Return the end of this job, now; `error` or, without one, the failure of its sequence is its reason."""
        seq, error = self.sequence, error or self.sequence.failure
        queued_s = (seq.started_at or perf_counter()) - self.submitted_at
        first_token_s = seq.first_token_at - self.submitted_at if seq.token_ids else 0.0
        reason = "error" if error else seq.finish_reason or "cancelled"
        return Ended(reason, seq.stats, queued_s, first_token_s, error, self.text.stop_string)

    @property
    def completion(self) -> Completion:
        """What was read so far; the reason is "cancelled" unless that is everything."""
        text = "".join(piece.text for piece in self.pieces)
        return Completion(
            text=text,
            token_ids=tuple(token for piece in self.pieces for token in piece.token_ids),
            finish_reason=self.sequence.finish_reason if self.is_read and self.sequence.finish_reason else "cancelled",
            logprobs=tuple(entry for piece in self.pieces for entry in piece.logprobs),
            stats=self.sequence.stats,
            tool_calls=calls_in(text, self.schemas, self.thought_end) if self.schemas else (),
        )


def completion_of(choices: Sequence[Generation]) -> Completion:
    """Return the answer to one prompt, with its further choices, from generations that were read to their ends."""
    first, *others = [job.completion for job in choices]
    return replace(first, others=tuple(others))


@dataclass(eq=False)
class Reading:
    """Work on the executor in a slot of its own, as for the logits of a prompt of `num_tokens`.

    `work(slot, block_table)` yields where other jobs may have a step, and returns what becomes `result`. Pages that are
    known to hold the beginning of `prompt_ids` are shared (`Loan`).
    """

    num_tokens: int
    work: Callable[[int, tuple[int, ...]], Generator[None, None, Any]]
    prompt_ids: tuple[int, ...] = ()
    result: Any = None
    receiver: Receiver = field(init=False, repr=False)
    loan: Loan | None = None
    running: Generator[None, None, Any] | None = None

    def ended(self, error: Exception | None = None) -> Ended:
        """Return the end of this job, with its error if it has failed."""
        return Ended("error" if error else "done", error=error)


Job = Generation | Reading
Item = tuple[Job, Piece | Ended]
"""A piece of a generation, or the end of a job."""


class Receiver(Protocol):
    """Takes what comes for its jobs. Called by whichever thread drives the engine, it must neither block nor raise."""

    def receive(self, items: list[Item]) -> None: ...


class Signal:
    """A message to a thread that waits at its inbox."""


WORK = Signal()
"""There is a new job."""
LEAD = Signal()
"""Nobody drives the engine any more: this thread may."""
STOP = Signal()
"""A thread that serves others shall end."""
Message = Item | Signal


class Closed(Signal):
    """The engine is closed, or `error` came of the attempt."""

    error: Exception | None = None


class Inbox:
    """Keeps what comes for the jobs of one caller until it is read."""

    def __init__(self) -> None:
        queue = SimpleQueue[Message]()
        self.put, self.get, self.is_empty = queue.put, queue.get, queue.empty

    def receive(self, items: list[Item]) -> None:
        for item in items:
            self.put(item)


class EndsInbox(Inbox):
    """An inbox for a caller that wants nothing before the end of a job: pieces are kept in the job."""

    def receive(self, items: list[Item]) -> None:
        super().receive(only_ends(items))


def only_ends(items: list[Item]) -> list[Item]:
    """Have generations keep what came for them, and return the ends of jobs."""
    for job, part in items:
        if isinstance(job, Generation):
            job.read(part)
    return [item for item in items if isinstance(item[1], Ended)]

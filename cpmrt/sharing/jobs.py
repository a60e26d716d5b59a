"""The jobs that callers give a shared engine, and the messages that come back to them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from cpmrt.engine import GenerationStats, Request
from cpmrt.engine import Sequence as EngineSequence
from cpmrt.engine.loan import Loan
from cpmrt.errors import CpmrtError
from cpmrt.generation import AnswerText, Completion, Piece

if TYPE_CHECKING:
    from cpmrt.tool_use.calls import Call, Schemas


@dataclass(frozen=True)
class Ended:
    """The end of a job. `reason` is the sequence's, "done" for a reading or, with an `error`, "error".

    Reasons of sequences are "stop", "length", "loop" and "cancelled". Both times count from the submission: `queued_s`
    to the first slot, `first_token_s` to the first token (0 without one).
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

    `shown_ids` are the special tokens that stay in its text.
    """

    request: Request
    shown_ids: frozenset[int] = frozenset()
    schemas: Schemas | None = None
    """The schemas of the tools that it may call."""
    only_known: bool = False
    """Whether calls of other tools are text, as its prompt shows some that it may not call."""
    thought_end: str | None = None
    """The marker that ends the thought which its prompt has opened; nothing inside the thought is a call."""
    pieces: list[Piece] = field(default_factory=list)
    """The pieces that the caller has read."""
    is_read: bool = False
    """Whether the caller has read the end of the generation too."""
    submitted_at: float = field(default_factory=perf_counter)
    receiver: Receiver = field(init=False, repr=False)
    sequence: EngineSequence = field(init=False)
    text: AnswerText = field(init=False, repr=False)

    def read(self, part: Piece | Ended) -> None:
        """Note a piece, or the end, that the caller has read."""
        if isinstance(part, Piece):
            self.pieces.append(part)
        else:
            self.is_read = True

    def ended(self, error: Exception | None = None) -> Ended:
        """Return the end of this job as of now. Its error is `error` or, without one, the failure of its sequence."""
        seq, error = self.sequence, error or self.sequence.failure
        queued_s = (seq.started_at or perf_counter()) - self.submitted_at
        first_token_s = seq.first_token_at - self.submitted_at if seq.token_ids else 0.0
        reason = "error" if error else seq.finish_reason or "cancelled"
        return Ended(reason, seq.stats, queued_s, first_token_s, error, self.text.stop_string)

    @property
    def completion(self) -> Completion:
        """The completion of the pieces read so far; its reason is "cancelled" until the end was read too."""
        text = "".join(piece.text for piece in self.pieces)
        return Completion(
            text=text,
            token_ids=tuple(token for piece in self.pieces for token in piece.token_ids),
            finish_reason=self.sequence.finish_reason if self.is_read and self.sequence.finish_reason else "cancelled",
            logprobs=tuple(entry for piece in self.pieces for entry in piece.logprobs),
            stats=self.sequence.stats,
            tool_calls=self._calls_in(text, self.schemas) if self.schemas else (),
        )

    def _calls_in(self, text: str, schemas: Schemas) -> tuple[Call, ...]:
        from cpmrt.tool_use.finder import calls_in  # few requests have tools

        return calls_in(text, schemas, self.thought_end, only_known=self.only_known)


def completion_of(choices: Sequence[Generation]) -> Completion:
    """Return the answer to one prompt, with its further choices, from generations that were read to their ends."""
    first, *others = [job.completion for job in choices]
    return replace(first, others=tuple(others))


class NoSlotError(CpmrtError):
    """Every slot is taken, and the job was not to wait for one."""


@dataclass(eq=False)
class Reading:
    """Work on the executor in a slot of its own, as for the logits of a prompt of `num_tokens`.

    `work(slot, block_table)` yields where other jobs may have a step, and its return value becomes `result`. Pages that
    are known to hold the beginning of `prompt_ids` are shared (`Loan`). Unless it `waits` for a slot, it ends with
    NoSlotError where none is free. One that was cancelled before it was submitted ends without having begun.
    """

    num_tokens: int
    work: Callable[[int, tuple[int, ...]], Generator[None, None, Any]]
    prompt_ids: tuple[int, ...] = ()
    waits: bool = True
    result: Any = None
    receiver: Receiver = field(init=False, repr=False)
    loan: Loan | None = None
    running: Generator[None, None, Any] | None = None
    is_cancelled: bool = False

    def ended(self, error: Exception | None = None) -> Ended:
        """Return the end of this job, with its error if it has failed."""
        return Ended("error" if error else "done", error=error)


Job = Generation | Reading
Item = tuple[Job, Piece | Ended]
"""A piece of a generation, or the end of a job."""


class Receiver(Protocol):
    """Takes the items of its jobs. Called by whichever thread drives the engine, it must neither block nor raise."""

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
    """The message that the engine was closed; `error` is what closing raised, if it did."""

    error: Exception | None = None


class Inbox:
    """Keeps the messages for one caller until they are read."""

    def __init__(self) -> None:
        queue = SimpleQueue[Message]()
        self.put, self.get, self.is_empty = queue.put, queue.get, queue.empty

    def receive(self, items: list[Item]) -> None:
        for item in items:
            self.put(item)


class EndsInbox(Inbox):
    """An inbox for a caller that waits only for the ends of jobs: pieces are kept in the job."""

    def receive(self, items: list[Item]) -> None:
        super().receive(only_ends(items))


def only_ends(items: list[Item]) -> list[Item]:
    """Keep the items of each generation in that generation, and return the items that are ends of jobs."""
    for job, part in items:
        if isinstance(job, Generation):
            job.read(part)
    return [item for item in items if isinstance(item[1], Ended)]

"""One request and how far it has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field
from enum import Enum, auto

from cpmrt.config import Sampling
from cpmrt.engine.draft_policy import DraftPolicy
from cpmrt.engine.guide import Guide, Matcher
from cpmrt.engine.late_form import LateForm, Trigger
from cpmrt.engine.loops import LoopGuard
from cpmrt.engine.prefix_cache import HeldPages
from cpmrt.engine.repeats import RepeatedText
from cpmrt.engine.stats import AcceptCounts, GenerationStats
from cpmrt.executor import SlotResult


@dataclass(frozen=True)
class ThinkingBudget:
    """The limit of a thought: one that is still open after the first `max_tokens` tokens of an answer is closed.

    `closing_ids(token_ids)` gives the tokens that close it; none if an answer of these tokens is not thinking.
    """

    max_tokens: int
    closing_ids: Callable[[TokenIds[int]], tuple[int, ...]]


@dataclass(frozen=True)
class Request:
    """A prompt with everything that decides its continuation. `stop_token_ids` include the model's end tokens.

    `stop` are strings that end the text; the caller who makes text of the tokens looks for them. `loop_repeats` is that
    of `loops.LoopGuard`, 0 for none; a loop raises the repetition penalty to `loop_penalty` where that is more, else it
    ends the answer. `matcher()` makes the matcher of the grammar that the answer must obey, if there is one;
    `trigger()` makes the trigger that finds where a grammar begins to bind an answer that is free until then.
    """

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    stop_token_ids: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    loop_repeats: int = 0
    loop_penalty: float = 1.0
    thinking: ThinkingBudget | None = None
    matcher: Callable[[], Matcher] | None = None
    trigger: Callable[[], Trigger] | None = None


class Phase(Enum):
    """A sequence is WAITING for a slot, then in PREFILL until its last chunk is submitted, in DECODE until FINISHED.

    A sequence that has to go on in another way (a pause) is PAUSED until its steps in flight are done, then in PREFILL
    or WAITING again.
    """

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    PAUSED = auto()
    FINISHED = auto()


@dataclass(eq=False)
class Sequence:
    """A request in the engine. Only `transitions` changes its phase, counts and tokens."""

    request: Request
    guide: Guide | None = None
    """The guide that leads the answer through its grammar; None: no grammar binds it."""
    late_form: LateForm | None = None
    """Finds where a grammar begins to bind the answer; None: no grammar will, or one does already."""
    phase: Phase = Phase.WAITING
    slot: int = -1
    text: tuple[int, ...] = field(init=False)
    """The tokens that are prefilled: the prompt, and the answer so far where the sequence was paused."""
    num_prefilled: int = 0
    """Tokens of the text that are cached or in submitted steps."""
    num_cached: int = 0
    """Prompt tokens whose keys and values were found in the prefix cache."""
    num_computed: int = 0
    """Tokens of the text that are cached or in steps that are done."""
    pages: HeldPages | None = None
    """KV pages that the sequence holds while it runs; None: its slot has its own, fixed ones."""
    num_in_flight: int = 0
    """Submitted steps that will give at least one token unless the sequence finishes first."""
    token_ids: list[int] = field(default_factory=list)
    """Generated tokens."""
    num_forced: int = 0
    """The number of tokens at the end of `token_ids` that were not sampled."""
    sampling: Sampling = field(init=False)
    guard: LoopGuard | None = field(init=False)
    thinking: ThinkingBudget | None = field(init=False)
    """The request's thinking budget until it is used up, then None."""
    finish_reason: str | None = None
    """The reason of the end: "stop", "length", "loop" or "cancelled"; None: it has not ended."""
    failure: Exception | None = None
    """The error of a step, or of the grammar, that ended the sequence."""
    accepts: AcceptCounts | None = None
    """The counts of its draft steps; None where the executor only decodes."""
    screened_steps: int = 0
    num_rescored: int = 0
    """Tokens whose logits the screened steps computed exactly, all steps together."""
    policy: DraftPolicy | None = None
    """Chooses the tree shape of its steps while it decodes alone; None: always the first shape."""
    repeats: RepeatedText | None = None
    """Tells the policy whether a step looks up its draft; None: no policy asks."""
    outbox: deque[SlotResult] = field(default_factory=deque)
    """Results nobody has read yet."""
    added_at: float = 0.0
    started_at: float = 0.0
    """The time when the sequence got its first slot; 0: not yet."""
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    def __post_init__(self) -> None:
        request = self.request
        self.text, self.sampling, self.thinking = request.prompt_ids, request.sampling, request.thinking
        self.guard = LoopGuard(request.loop_repeats) if request.loop_repeats else None

    @property
    def all_token_ids(self) -> tuple[int, ...]:
        """The prompt and the answer so far."""
        return (*self.request.prompt_ids, *self.token_ids)

    @property
    def num_wanted(self) -> int:
        """The total number of generated tokens at which the sequence ends or pauses."""
        most = self.request.max_new_tokens
        return min(most, self.thinking.max_tokens) if self.thinking else most

    @property
    def room(self) -> int:
        """The number of tokens that are still wanted before the sequence ends or pauses."""
        return self.num_wanted - len(self.token_ids)

    @property
    def num_written(self) -> int:
        """Tokens whose keys and values are written. The last token's are not: the next step starts from it."""
        return self.num_computed + max(self._num_sampled - 1, 0)

    @property
    def num_expected(self) -> int:
        """Tokens that are written once the plain steps in flight are done, if none of them ends the sequence."""
        return len(self.text) + self._num_sampled + self.num_in_flight - 1

    @property
    def _num_sampled(self) -> int:
        """Tokens that were sampled behind the text; 0 where the text already includes forced tokens at the end."""
        return max(len(self.request.prompt_ids) + len(self.token_ids) - self.num_forced - len(self.text), 0)

    @property
    def stats(self) -> GenerationStats:
        """Return what the sequence has cost and given so far."""
        started = bool(self.token_ids)
        return GenerationStats(
            prompt_tokens=len(self.request.prompt_ids),
            new_tokens=len(self.token_ids),
            prefill_s=self.first_token_at - self.added_at if started else 0.0,
            decode_s=self.last_token_at - self.first_token_at if started else 0.0,
            cached_tokens=self.num_cached,
            screened_steps=self.screened_steps,
            mean_rescored=self.num_rescored / self.screened_steps if self.screened_steps else None,
            **(self.accepts.figures if self.accepts else {}),
        )

"""One request and how far it has come."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

from cpmrt.config import Sampling
from cpmrt.engine.prefix_cache import HeldPages
from cpmrt.engine.speculation import DraftPolicy
from cpmrt.engine.stats import AcceptCounts, GenerationStats
from cpmrt.executor import SlotResult


@dataclass(frozen=True)
class Request:
    """A prompt with everything that decides its continuation. `stop_token_ids` include the model's end tokens.

    `stop` are strings that end the text; whoever makes the text looks for them.
    """

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    stop_token_ids: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[str, ...] = ()


class Phase(Enum):
    """A sequence is WAITING for a slot, then in PREFILL until its last chunk is submitted, in DECODE until FINISHED."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()


@dataclass(eq=False)
class Sequence:
    """A request in the engine. Only `transitions` changes its phase, counts and tokens."""

    request: Request
    phase: Phase = Phase.WAITING
    slot: int = -1
    num_prefilled: int = 0
    """Prompt tokens that are cached or in submitted steps."""
    num_cached: int = 0
    """Prompt tokens whose keys and values were found in the prefix cache."""
    num_computed: int = 0
    """Prompt tokens that are cached or in steps that are done."""
    pages: HeldPages | None = None
    """KV pages that it holds while it runs; None: those of its slot."""
    num_in_flight: int = 0
    """Submitted steps that will give at least one token unless the sequence finishes first."""
    token_ids: list[int] = field(default_factory=list)
    """Generated tokens."""
    finish_reason: str | None = None
    """"stop", "length" or "cancelled"."""
    failure: Exception | None = None
    """The error of the step that ended it."""
    accepts: AcceptCounts | None = None
    """What its draft steps gave; None where the executor only decodes."""
    policy: DraftPolicy | None = None
    """Chooses the tree shape of its steps while it decodes alone; None: always the first shape."""
    outbox: deque[SlotResult] = field(default_factory=deque)
    """Results nobody has read yet."""
    added_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    @property
    def num_written(self) -> int:
        """Tokens whose keys and values are written: not those of the last one, from which the next step starts."""
        return self.num_computed + max(len(self.token_ids) - 1, 0)

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
            **(self.accepts.figures if self.accepts else {}),
        )

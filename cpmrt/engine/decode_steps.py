"""The decode steps of the sequences that decode together: plain ones, or with drafts of a shape that pays off."""

from __future__ import annotations

from cpmrt.engine import transitions
from cpmrt.engine.repeats import RepeatedText
from cpmrt.engine.sequence import Sequence
from cpmrt.engine.speculation import PLAIN, DraftPolicy
from cpmrt.engine.stats import AcceptCounts
from cpmrt.executor import Decode, ExecutorLimits, Speculate


class DecodeSteps:
    """Makes decode steps, and keeps what drafting learns from one sequence to the next.

    With `adaptive`, and if the executor knows what its steps cost, each sequence has a policy for its draft steps.
    """

    def __init__(self, limits: ExecutorLimits, *, adaptive: bool):
        self._limits = limits
        self._has_policies = adaptive and bool(limits.step_seconds)
        self._looks_up = any(shape.lookup_length for shape in limits.tree_shapes)
        self._policy: DraftPolicy | None = None
        """The policy of the sequence that began last."""
        self._decoding: tuple[Sequence, ...] = ()
        """The sequences of the last step."""
        self._made: dict[int, Decode | Speculate] = {}
        """Their steps by shape, made once: mostly the same sequences take the next step too."""

    def begin(self, seq: Sequence) -> None:
        """Give a sequence that was admitted what its draft steps need; anew where it was paused."""
        limits = self._limits
        if not limits.tree_shapes:
            return
        seq.accepts = seq.accepts or AcceptCounts(limits)
        if self._has_policies:
            self._policy = seq.policy = DraftPolicy(limits.tree_shapes, limits.step_seconds, self._policy)
            seq.repeats = RepeatedText(seq.text) if self._looks_up else None

    def next(self, decoding: tuple[Sequence, ...], *, may_draft: bool) -> Decode | Speculate:
        """Return the next step of the sequences that decode."""
        if decoding != self._decoding or any(seq.guide for seq in decoding):
            self._decoding, self._made = decoding, {}
        shape = transitions.next_shape(decoding[0]) if may_draft else PLAIN
        step = self._made.get(shape)
        if step is None:
            step = self._made[shape] = transitions.decode_step(decoding, shape, self._limits)
        return step

    def forget(self) -> None:
        """Make the next step anew: a sequence may get another slot."""
        self._decoding = ()

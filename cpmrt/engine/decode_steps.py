"""The decode steps of the sequences that decode together: plain ones, or with drafts of a shape that pays off."""

from __future__ import annotations

from cpmrt.engine import transitions
from cpmrt.engine.draft_policy import PLAIN, DraftPolicy
from cpmrt.engine.repeats import RepeatedText
from cpmrt.engine.sequence import Phase, Sequence
from cpmrt.engine.stats import AcceptCounts
from cpmrt.executor import Decode, ExecutorLimits, Speculate, Step, StepResult


class DecodeSteps:
    """Makes decode steps, and carries the estimates of drafting over from one sequence to the next.

    With `adaptive`, and if the executor knows what its steps cost, each sequence has a policy for its draft steps, and
    so has each number of sequences that decode together.
    """

    def __init__(self, limits: ExecutorLimits, *, adaptive: bool):
        self._limits = limits
        self._has_policies = adaptive and bool(limits.step_seconds)
        self._looks_up = any(shape.lookup_length for shape in limits.tree_shapes)
        self._policy: DraftPolicy | None = None
        """The policy of the sequence that began last."""
        self._policies: dict[tuple[float, ...], DraftPolicy] = {}
        """The policies of several sequences by what their steps cost."""
        self._decoding: tuple[Sequence, ...] = ()
        """The sequences of the step that was made last."""
        self._made: dict[int, Decode | Speculate] = {}
        """The steps of `_decoding` by shape, kept for reuse: mostly the same sequences take the next step too."""

    def begin(self, seq: Sequence) -> None:
        """Give an admitted sequence its accept counts and its policy. After a pause the policy is a new one."""
        limits = self._limits
        if not limits.tree_shapes:
            return
        seq.accepts = seq.accepts or AcceptCounts(limits)
        if self._has_policies:
            self._policy = seq.policy = DraftPolicy(limits.tree_shapes, limits.step_seconds, self._policy)
            seq.repeats = RepeatedText(seq.text) if self._looks_up else None

    def next(self, decoding: tuple[Sequence, ...], *, may_draft: bool) -> Decode | Speculate:
        """Return the next step of the sequences that decode."""
        if decoding != self._decoding or any([seq.guide for seq in decoding]):
            self._decoding, self._made = decoding, {}
        shape = self._next_shape(decoding) if may_draft else PLAIN
        step = self._made.get(shape)
        if step is None:
            step = self._made[shape] = transitions.decode_step(decoding, shape, self._limits)
        return step

    def applied(self, step: Step, sequences: tuple[Sequence, ...], result: StepResult) -> None:
        """Report to the policy of several sequences what a step gave those that go on; `result` is applied already."""
        if not isinstance(step, Speculate) or len(step.slots) == 1 or not self._has_policies:
            return
        policy, given = self._policy_of(len(step.slots)), list[tuple[int, bool]]()
        for seq, gained in zip(sequences, result.slots, strict=True):
            if seq.phase is Phase.DECODE and gained.token_ids:
                given.append((len(gained.token_ids), seq.repeats is not None and seq.repeats.was_repeated))
        if policy is not None:
            policy.observe_several(step.shape, given)

    def forget(self) -> None:
        """Drop the steps that are kept for reuse, because a sequence may get another slot."""
        self._decoding = ()

    def _next_shape(self, decoding: tuple[Sequence, ...]) -> int:
        """Choose the shape of sequences that may draft, or PLAIN."""
        if len(decoding) == 1:
            return transitions.next_shape(decoding[0])
        if not self._has_policies:
            return self._limits.shapes_for(len(decoding))[0]
        policy = self._policy_of(len(decoding))
        return PLAIN if policy is None else policy.choose(max(seq.room - seq.num_in_flight for seq in decoding))

    def _policy_of(self, num_sequences: int) -> DraftPolicy | None:
        """Return the policy of `num_sequences` sequences; None where the cost of their steps is unknown."""
        seconds = self._limits.seconds_for(num_sequences)
        if seconds and seconds not in self._policies:
            self._policies[seconds] = DraftPolicy(self._limits.tree_shapes, seconds, self._policy)
        return self._policies.get(seconds)

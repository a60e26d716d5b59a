"""The policy that chooses each step of a sequence that decodes alone, or of several that decode together: a draft tree
of some shape, or a plain step.

The tokens that a shape of depth D will give are estimated as 1 + r1 + r1 r2 + ... + r1 .. rD, where rd is the accept
rate at depth d: of the steps whose token at depth d - 1 was accepted, the share that had a token at depth d accepted
too. Older steps weigh less (exponential forgetting). For a shape that was used lately, the tokens that it really gave
count too. Where lookups beside a draft take the place of trees, both are estimated apart, and weighted by how often
each came lately. The policy takes the choice with the most expected tokens a second. To replace the present choice a
shape must be better by a margin; until it has been tried it is credited with a little more than the rates say, because
a larger tree is more often right.

While plain decoding is best, the policy tries a single draft step now and then. The number of plain steps between two
trials doubles as long as trials fail, within bounds set by the time that failing trials cost; a trial that paid off is
followed by another at once.

A sequence takes over the estimate of the sequence before it, with a low weight, and its place between two trials, so
that short answers do not pay for the same trials again and again. Steps of several sequences have a policy of their
own for each number of them, by what such steps cost; what it learns holds for all. There is no clock in here.
"""

from __future__ import annotations

from collections.abc import Sequence

from cpmrt.config import TreeShape

PLAIN = -1
"""The choice of a plain step; other choices are indices of shapes."""
_FIRST_RATE = 0.6
"""The accept rate assumed at depth 1 until there are results; deeper, the rate of the depth above is assumed."""
_FIRST_WEIGHT = 2.0
"""The weight of this assumption, in results."""
_DERIVED_WEIGHT = 4.0
"""The weight of the estimate from the rates, in steps of the shape's own."""
_GROWTH = 1 / 0.95
"""The weight of a draft step's result, relative to that of the step before it."""
_OLD_WEIGHT = 3.0
"""The most that all results before a trial may weigh together, in results: they are that much older."""
_MARGIN = 1.04
"""The factor by which another choice must be better than the present one."""
_CURIOSITY = 1.1
"""The tokens credited to a shape that is not in use, relative to what follows from the rates."""
_HIGHEST_TRIAL_COST, _LOWEST_TRIAL_COST = 0.015, 0.005
"""The share of the time that failing trials may cost, at first and in the long run."""
_SHORTEST_GAP = 4
"""The fewest plain steps between two trials."""
_LONGEST_REST = 4
"""The most results between two decisions: a decision takes the host longer than all else that it does in a step."""


class _AcceptRates:
    """Estimates how many tokens a step of each shape will give; `depths`: the drafted tokens on its longest path.

    It sums results times a weight that grows from step to step, which has the effect of forgetting older results.
    """

    def __init__(self, depths: list[int]):
        self._depths, depth = depths, max(depths, default=0)
        self._weight = 1.0
        self._reached, self._accepted = [0.0] * depth, [0.0] * depth
        if depth:
            self._reached[0], self._accepted[0] = _FIRST_WEIGHT, _FIRST_WEIGHT * _FIRST_RATE
        self._steps, self._tokens = [0.0] * len(depths), [0.0] * len(depths)

    def add(self, shape: int, num_tokens: int) -> None:
        """Count a step of this shape that gave so many tokens."""
        self._weight = weight = self._weight * _GROWTH
        self._steps[shape] += weight
        self._tokens[shape] += num_tokens * weight
        reached, accepted = self._reached, self._accepted
        for depth in range(num_tokens - 1):
            reached[depth] += weight
            accepted[depth] += weight
        if num_tokens <= self._depths[shape]:
            reached[num_tokens - 1] += weight
        if weight > 1e100:
            self._divide(weight)

    def fade(self, num_results: float) -> None:
        """Reduce the weight of everything seen so far to that of `num_results` results, if it is more."""
        if self._reached:
            self._weight = max(self._weight, self._reached[0] / num_results)

    def expected_tokens(self) -> tuple[list[float], list[float]]:
        """Return two estimates for each shape: the plain one, and the one with the credit of an untried shape."""
        weight = 0.0
        total, reach, rate, derived = 1.0, 1.0, _FIRST_RATE, [1.0]
        for reached, accepted in zip(self._reached, self._accepted):  # noqa: B905 - strict costs a microsecond
            rate = (accepted + weight * rate) / (reached + weight)
            weight = _FIRST_WEIGHT * self._weight
            reach *= rate
            total += reach
            derived.append(total)
        weight = _DERIVED_WEIGHT * self._weight
        sober, hopeful = [], []
        for depth, steps, tokens in zip(self._depths, self._steps, self._tokens):  # noqa: B905
            given = weight * derived[depth]
            sober.append((given + tokens) / (weight + steps))
            hopeful.append((given * _CURIOSITY + tokens) / (weight + steps))
        return sober, hopeful

    def _divide(self, divisor: float) -> None:
        for sums in (self._reached, self._accepted, self._steps, self._tokens):
            sums[:] = [value / divisor for value in sums]
        self._weight /= divisor


class AcceptEstimate:
    """Estimates how many tokens a step of each shape will give.

    Steps that verified a looked up chain are estimated apart from those that verified a tree: the accept rates of the
    one kind say nothing about the other.
    """

    def __init__(self, shapes: tuple[TreeShape, ...]):
        self._trees = _AcceptRates([shape.tree_depth for shape in shapes])
        lengths = [shape.lookup_length for shape in shapes]
        self._chains = _AcceptRates(lengths) if any(lengths) else None
        self._lengths, self._num_chains, self._num_steps = lengths, 0.0, _FIRST_WEIGHT

    def add(self, shape: int, num_tokens: int, *, is_lookup: bool = False) -> None:
        """Count a step of this shape that gave so many tokens."""
        if self._chains is None or not self._lengths[shape]:
            self._trees.add(shape, num_tokens)
            return
        (self._chains if is_lookup else self._trees).add(shape, num_tokens)
        self._num_chains = self._num_chains / _GROWTH + is_lookup
        self._num_steps = self._num_steps / _GROWTH + 1

    def fade(self, num_results: float) -> None:
        """Reduce the weight of everything seen so far to that of `num_results` results, if it is more."""
        self._trees.fade(num_results)
        if self._chains is not None:
            self._chains.fade(num_results)

    def expected_tokens(self) -> tuple[list[float], list[float]]:
        """Return two estimates for each shape: the plain one, and the one with the credit of an untried shape."""
        of_trees = self._trees.expected_tokens()
        if self._chains is None:
            return of_trees
        of_chains, share = self._chains.expected_tokens(), self._num_chains / self._num_steps
        shares = [share if length else 0.0 for length in self._lengths]
        sober, hopeful = (
            [tree + part * (chain - tree) for tree, chain, part in zip(trees, chains, shares, strict=True)]
            for trees, chains in zip(of_trees, of_chains, strict=True)
        )
        return sober, hopeful


class DraftPolicy:
    """Chooses the steps of one sequence, or of several together: call `choose` for each step, and `observe` (or
    `observe_several`) for each draft step's result.

    Results come in the order of the steps, and may lag: several steps may be chosen before the first is observed.
    `step_seconds` are those of a plain step, then of each shape; `before` is the policy of the sequence before.
    """

    def __init__(
        self, shapes: tuple[TreeShape, ...], step_seconds: tuple[float, ...], before: DraftPolicy | None = None
    ):
        self._plain_s, self._seconds = step_seconds[0], step_seconds[1:]
        # A shape that costs more than plain steps for all it can give is never worth a trial.
        self._usable = [
            index
            for index, (shape, seconds) in enumerate(zip(shapes, self._seconds, strict=True))
            if seconds < shape.max_emitted * self._plain_s
        ]
        self._estimate: AcceptEstimate = before._estimate if before else AcceptEstimate(shapes)
        self._estimate.fade(_OLD_WEIGHT)
        self._num_plain: int = before._num_plain if before else 0
        self._gap: int = before._gap if before else 0
        """`_num_plain` counts the plain steps since the last trial, `_gap` those that must come before the next one."""
        self._num_in_flight = self._num_trailing = 0
        """Draft steps that are not observed yet, and those among them chosen before plain steps became best."""
        self._best = PLAIN
        self._candidate = -1
        """The best shape, to be tried while plain steps are best."""
        self._rest, self._num_undecided = 0, 0
        """The results to wait for before the next decision (more as long as nothing changes), and those seen so far."""
        self._decide()
        if self._usable:
            self._gap = self._gap or self._gap_of(_HIGHEST_TRIAL_COST)

    def choose(self, num_wanted: int) -> int:
        """Return the next step, a shape's index or PLAIN. `num_wanted` is the number of tokens still wanted."""
        if not self.will_draft(num_wanted):
            self._num_plain += self._best == PLAIN
            return PLAIN
        self._num_plain = 0
        self._num_in_flight += 1
        return self._candidate

    def will_draft(self, num_wanted: int) -> bool:
        """Tell whether `choose` would return a shape."""
        if num_wanted == 1 or not self._usable:
            return False
        return self._best != PLAIN or self._num_plain >= self._gap

    def observe(self, shape: int, num_tokens: int, *, is_lookup: bool = False) -> None:
        """Take the result of the oldest draft step not observed yet. `is_lookup`: it verified a looked up chain."""
        self.observe_several(shape, [(num_tokens, is_lookup)])

    def observe_several(self, shape: int, given: Sequence[tuple[int, bool]]) -> None:
        """Take the result of the oldest draft step for each of its sequences that go on, as `observe` does for one."""
        is_trailing = self._num_trailing > 0
        self._num_in_flight -= 1
        self._num_trailing -= is_trailing
        if not given:
            return
        if self._best == PLAIN and not is_trailing:
            self._estimate.fade(_OLD_WEIGHT)
            total = sum(num_tokens for num_tokens, _ in given)
            paid_off = total * self._plain_s > len(given) * self._seconds[shape]
            shortest, longest = self._gap_of(_HIGHEST_TRIAL_COST), self._gap_of(_LOWEST_TRIAL_COST)
            self._gap = 0 if paid_off else max(shortest, min(2 * self._gap, longest))
        for num_tokens, is_lookup in given:
            self._estimate.add(shape, num_tokens, is_lookup=is_lookup)
        self._num_undecided += 1
        if self._num_undecided >= self._rest or self._best == PLAIN:
            self._num_undecided = 0
            self._rest = min(self._rest + 1, _LONGEST_REST) if self._decide() else 1

    def _gap_of(self, cost: float) -> int:
        """Return the number of plain steps between two trials at which failing trials cost this share of the time."""
        return max(_SHORTEST_GAP, round((self._seconds[self._candidate] / self._plain_s - 1) / cost))

    def _decide(self) -> bool:
        """Set the best choice and the best shape, and return whether the best choice has stayed the same."""
        if not self._usable:
            return True
        sober, hopeful = self._estimate.expected_tokens()
        seconds, present, plain_rate = self._seconds, self._best, 1 / self._plain_s
        best, best_rate = PLAIN, plain_rate
        candidate, candidate_rate = PLAIN, 0.0
        for index in self._usable:
            rate = sober[index] / seconds[index]
            if rate > candidate_rate:
                candidate, candidate_rate = index, rate
            if index != present:
                if present != PLAIN and rate > plain_rate:
                    rate = hopeful[index] / seconds[index]
                rate /= _MARGIN
            if rate > best_rate:
                best, best_rate = index, rate
        if best == PLAIN != present:
            self._num_trailing, self._num_plain = self._num_in_flight, 0
            self._gap = self._gap_of(_HIGHEST_TRIAL_COST)
        self._best, self._candidate = best, candidate if best == PLAIN else best
        return best == present

"""An executor without a model: the next token is a hash of the tokens so far. It holds the engine to the contract."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from zlib import crc32

from cpmrt.config import TreeShape
from cpmrt.cuda.step.lengths import Lengths
from cpmrt.executor import (
    MAX_CERTAIN,
    Admit,
    Decode,
    ExecutorLimits,
    Mask,
    Prefill,
    Release,
    SlotResult,
    Speculate,
    Step,
    StepResult,
    TokenLogprobs,
    TreeMasks,
)

VOCAB = 50
TREE_SHAPES = [
    *[(TreeShape.chain(length),) for length in (1, 3, 7)],
    (TreeShape(), TreeShape(1, 8, 8)),
    (TreeShape(4, 10, 32), TreeShape.chain(8), TreeShape(2, 3, 10)),
    (TreeShape(3, 4, 36), TreeShape(1, 1, 2)),
]


def next_token(tokens: list[int], seed: int) -> int:
    """Return the next token, a hash of the last three tokens, the length and the seed."""
    return crc32(repr((tokens[-3:], len(tokens), seed)).encode()) % VOCAB


def allowed_tokens(mask: Mask | None) -> list[int]:
    """Return the tokens that a row may sample."""
    if mask is None or mask.bits is None:
        return list(range(VOCAB))
    return [token for token in range(min(VOCAB, 8 * len(mask.bits))) if mask.bits[token // 8] >> token % 8 & 1]


def masked_token(tokens: list[int], seed: int, allowed: list[int]) -> int:
    """Return the next token if it is allowed, else an allowed one that it determines."""
    token = next_token(tokens, seed)
    return token if token in allowed else allowed[token % len(allowed)]


@dataclass
class Running:
    admit: Admit
    tokens: list[int] = field(default_factory=list)
    num_generated: int = 0
    ready: bool = False
    finished: bool = False


class LazyResult:
    """A step's result that is computed only when somebody waits, like that of a GPU that lags behind its queue.

    `counted` has, for each row of a decode step or tree of a speculative one, the length that was assumed when the step
    was submitted, and whether that length was certain.
    """

    def __init__(self, executor: ScriptedExecutor, counted: tuple[tuple[int, bool], ...]):
        self.executor, self.counted, self.result, self.is_read = executor, counted, None, False

    def is_done(self) -> bool:
        """Return whether the result is there; if not, carry out one step of the queue first, as if time passed."""
        if self.result is None:
            self.executor.run_one()
        return self.result is not None

    def wait(self) -> StepResult:
        while self.result is None:
            self.executor.run_one()
        self.is_read = True
        return self.result


class ScriptedExecutor:
    """An executor with deterministic tokens and random drafts, many of them wrong, which must not show in the output.

    Drafts have their own random state. `accuracy` is the probability with which a draft is right on purpose.
    """

    def __init__(self, limits: ExecutorLimits, draft_seed: int = 0, overshoot: bool = False, accuracy: float = 2 / 3):
        self._limits, self.random, self.overshoot = limits, random.Random(draft_seed), overshoot
        self.accuracy = accuracy
        self.running: dict[int, Running] = {}
        self.queue: deque[tuple[Step, LazyResult]] = deque()
        self.lengths = Lengths(limits.tree_shapes)
        """The lengths of sequences as the CUDA executor counts them when steps are submitted."""
        self.drafted: list[tuple[Speculate, LazyResult]] = []
        self.steps: list[Step] = []
        self.most_in_flight = 0
        self.closed = False

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    def submit(self, step: Step) -> LazyResult:
        assert not self.closed
        self.steps.append(step)
        self.lengths.add(step)
        rows = step.slots if isinstance(step, (Decode, Speculate)) else ()
        pending = LazyResult(self, tuple(map(self._counted, rows)))
        self.queue.append((step, pending))
        if isinstance(step, Speculate):
            self.drafted.append((step, pending))
        in_flight = sum(not isinstance(queued, (Admit, Release)) for queued, _ in self.queue)
        self.most_in_flight = max(self.most_in_flight, in_flight)
        return self.lengths.followed(step, pending) if isinstance(step, Speculate) else pending

    def prompt_logits(self, slot, token_ids):
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True

    def run_one(self) -> None:
        step, pending = self.queue.popleft()
        if isinstance(step, (Decode, Speculate)):
            self._check_lengths(step, pending.counted)
        pending.result = StepResult(tuple(self._run(step)))

    def _run(self, step: Step) -> list[SlotResult]:
        if isinstance(step, Admit):
            assert step.slot not in self.running and 0 <= step.slot < self._limits.max_sequences
            self.running[step.slot] = Running(step)
            return []
        if isinstance(step, Release):
            self.running.pop(step.slot, None)
            return []
        if isinstance(step, Prefill):
            return [self._prefill(step)]
        assert len(set(step.slots)) == len(step.slots)
        if isinstance(step, Speculate):
            assert step.shape in self._limits.shapes_for(len(step.slots))
            assert len(step.slots) == 1 or step.masks is None
            shape = self._limits.tree_shapes[step.shape]
            return [self._speculate(self.running[slot], shape, step.masks) for slot in step.slots]
        masks, certain = step.masks or (None,) * len(step.slots), step.certain or ((),) * len(step.slots)
        if step.certain:
            assert len(step.slots) + sum(map(len, certain)) <= self._limits.certain_rows
        rows = zip(step.slots, masks, certain, strict=True)
        return [self._decode(self.running[slot], mask, tokens) for slot, mask, tokens in rows]

    def _counted(self, slot: int) -> tuple[int, bool]:
        self.drafted = [(step, pending) for step, pending in self.drafted if not pending.is_read]
        return self.lengths.of(slot), not any(slot in step.slots for step, _ in self.drafted)

    def _check_lengths(self, step: Decode | Speculate, counted: tuple[tuple[int, bool], ...]) -> None:
        """Check that the rows' lengths were known at submission: exactly, or as a limit if drafts were not read yet."""
        if isinstance(step, Decode):
            added = [len(certain) for certain in step.certain] or [0] * len(counted)
        else:
            added = [self._limits.tree_shapes[step.shape].max_emitted - 1] * len(counted)
        for slot, more, (known, is_exact) in zip(step.slots, added, counted, strict=True):
            running = self.running[slot]
            actual = len(running.tokens) + more
            assert running.finished or known == actual or (not is_exact and known > actual)

    def _prefill(self, step: Prefill) -> SlotResult:
        running = self.running[step.slot]
        assert step.position == len(running.tokens) and not running.ready
        assert 0 < len(step.token_ids) <= self._limits.prefill_chunk
        running.tokens.extend(step.token_ids)
        running.ready = step.is_last
        return SlotResult(*self._emit(running, step.mask)) if step.is_last else SlotResult()

    def _decode(self, running: Running, mask: Mask | None, certain: tuple[int, ...]) -> SlotResult:
        assert running.ready and len(certain) <= MAX_CERTAIN
        if running.finished and not self.overshoot:
            return SlotResult()
        for token in certain:
            self._append(running, token)
        assert self.overshoot or not running.finished, "a certain token was the last one: the rest is surplus"
        tokens, logprobs = self._emit(running, mask)
        return SlotResult((*certain, *tokens), logprobs)

    def right(self, running: Running, path: tuple[int, ...]) -> int:
        """Return the token that comes behind a path of drafts."""
        return next_token([*running.tokens, *path], running.admit.seed)

    def _speculate(self, running: Running, shape: TreeShape, masks: TreeMasks | None) -> SlotResult:
        """Return the tokens of the longest drafted path that is right, and the token after it."""
        assert running.ready
        if not running.finished:
            self._check_room(running, shape)
        children = self._draft(running, shape)
        left = self._left(children, shape, masks)
        tokens, logprobs, node = (), (), 0
        while node in left:
            token, logprob = self._emit(running, left[node])
            tokens, logprobs = tokens + token, logprobs + logprob
            node = children.get((node, *token))
        return SlotResult(tokens, logprobs)

    def _left(
        self, children: dict[tuple[int, int], int], shape: TreeShape, masks: TreeMasks | None
    ) -> dict[int, Mask | None]:
        """Return the grammar masks of the nodes that masks leave in the tree, by node."""
        if masks is None:
            return dict.fromkeys(range(shape.tree_size))
        tokens, parents = [-1] * shape.tree_size, [-1] * shape.tree_size
        for (parent, token), node in children.items():
            tokens[node], parents[node] = token, parent
        left = masks.of_nodes(tokens, parents)
        return {node: Mask(bits, is_filled=True) for node, bits in left.items()}

    def _check_room(self, running: Running, shape: TreeShape) -> None:
        """Check that the sequence's pages have room for all that the step may write within the context."""
        table, limits = running.admit.block_table, self._limits
        last = min(len(running.tokens) - 1 + shape.num_reserved, limits.max_context - 1)
        assert self.overshoot or not table or last < len(table) * limits.page_size

    def _draft(self, running: Running, shape: TreeShape) -> dict[tuple[int, int], int]:
        """Return a random tree of that shape as a map from (parent, token) to node."""
        root = len(running.tokens) - 1
        paths: list[tuple[int, ...]] = [()]
        children: dict[tuple[int, int], int] = {}
        for node in range(1, shape.tree_size):
            inner = [index for index, path in enumerate(paths) if len(path) < shape.num_passes]
            parent = self.random.choice(inner[-shape.top_k :])
            path = paths[parent]
            is_right = self.random.random() < self.accuracy
            token = self.right(running, path) if is_right else self.random.randrange(VOCAB)
            paths.append((*path, token))
            # A node past the context is never accepted.
            if root + max(node, len(path) + 1) < self._limits.max_context:
                children.setdefault((parent, token), node)
        return children

    def _emit(self, running: Running, mask: Mask | None = None) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
        assert mask is None or mask.is_filled, "a step is carried out without its mask"
        if running.finished and not self.overshoot:
            return (), ()
        allowed = allowed_tokens(mask)
        token = masked_token(running.tokens, running.admit.seed, allowed)
        self._append(running, token)
        return (token,), (TokenLogprobs(token, -float(token)),)

    def _append(self, running: Running, token: int) -> None:
        running.tokens.append(token)
        assert self.overshoot or len(running.tokens) <= self._limits.max_context
        running.num_generated += 1
        running.finished = (
            token in running.admit.stop_token_ids or running.num_generated == running.admit.max_new_tokens
        )


def plain_continuation(prompt: list[int], seed: int, max_new_tokens: int, stop: set[int]) -> list[int]:
    """Return the tokens that any engine must produce, computed by the shortest possible loop."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_new_tokens:
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]

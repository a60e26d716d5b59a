"""An executor without a model: the next token is a hash of the tokens so far. It holds the engine to the contract."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from zlib import crc32

from cpmrt.executor import (
    Admit,
    Decode,
    ExecutorLimits,
    Prefill,
    Release,
    SlotResult,
    Step,
    StepResult,
    TokenLogprobs,
)

VOCAB = 50


def next_token(tokens: list[int], seed: int) -> int:
    """Depends on the last three tokens, the length and the seed."""
    return crc32(repr((tokens[-3:], len(tokens), seed)).encode()) % VOCAB


@dataclass
class Running:
    admit: Admit
    tokens: list[int] = field(default_factory=list)
    num_generated: int = 0
    ready: bool = False
    finished: bool = False


class LazyResult:
    """Carried out only when somebody waits, like a GPU that lags behind its queue."""

    def __init__(self, executor: ScriptedExecutor):
        self.executor, self.result = executor, None

    def is_done(self) -> bool:
        """Whoever asks makes time pass."""
        if self.result is None:
            self.executor.run_one()
        return self.result is not None

    def wait(self) -> StepResult:
        while self.result is None:
            self.executor.run_one()
        return self.result


class ScriptedExecutor:
    """Deterministic tokens; drafts are wrong at random (their own random state), which must not show in the output."""

    def __init__(self, limits: ExecutorLimits, draft_seed: int = 0, overshoot: bool = False):
        self._limits, self.random, self.overshoot = limits, random.Random(draft_seed), overshoot
        self.running: dict[int, Running] = {}
        self.queue: deque[tuple[Step, LazyResult]] = deque()
        self.steps: list[Step] = []
        self.most_in_flight = 0
        self.closed = False

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    def submit(self, step: Step) -> LazyResult:
        assert not self.closed
        self.steps.append(step)
        pending = LazyResult(self)
        self.queue.append((step, pending))
        in_flight = sum(not isinstance(queued, (Admit, Release)) for queued, _ in self.queue)
        self.most_in_flight = max(self.most_in_flight, in_flight)
        return pending

    def prompt_logits(self, slot, token_ids):
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True

    def run_one(self) -> None:
        step, pending = self.queue.popleft()
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
        count = 1 if isinstance(step, Decode) else self._limits.tree_shapes[step.shape].max_emitted
        return [self._decode(self.running[slot], count) for slot in step.slots]

    def _prefill(self, step: Prefill) -> SlotResult:
        running = self.running[step.slot]
        assert step.position == len(running.tokens) and not running.ready
        assert 0 < len(step.token_ids) <= self._limits.prefill_chunk
        running.tokens.extend(step.token_ids)
        running.ready = step.is_last
        return SlotResult(*self._emit(running)) if step.is_last else SlotResult()

    def _decode(self, running: Running, count: int) -> SlotResult:
        """Up to `count` tokens: each draft is right two times out of three."""
        assert running.ready
        tokens, logprobs = (), ()
        for _ in range(count):
            token, logprob = self._emit(running)
            tokens, logprobs = tokens + token, logprobs + logprob
            if self.random.random() < 1 / 3:
                break
        return SlotResult(tokens, logprobs)

    def _emit(self, running: Running) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
        if running.finished and not self.overshoot:
            return (), ()
        token = next_token(running.tokens, running.admit.seed)
        running.tokens.append(token)
        assert self.overshoot or len(running.tokens) <= self._limits.max_context
        running.num_generated += 1
        running.finished = (
            token in running.admit.stop_token_ids or running.num_generated == running.admit.max_new_tokens
        )
        return (token,), (TokenLogprobs(token, -float(token)),)


def plain_continuation(prompt: list[int], seed: int, max_new_tokens: int, stop: set[int]) -> list[int]:
    """What any engine must produce, written as the shortest loop."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_new_tokens:
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]

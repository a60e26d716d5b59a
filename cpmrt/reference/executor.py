"""The reference executor: the shared forward on NumPy ops, one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cpmrt.config import ModelConfig
from cpmrt.dtypes import F32, Array, DType
from cpmrt.errors import ConfigError, NoDeviceError
from cpmrt.executor import (
    Admit,
    Decode,
    ExecutorLimits,
    Pending,
    Prefill,
    Recall,
    Release,
    SlotResult,
    Step,
    StepResult,
)
from cpmrt.memory.arena import Arena
from cpmrt.memory.kv_pages import PAGE_SIZE, KVLayout
from cpmrt.memory.plan import WEIGHT_PARTS, MemoryPlan
from cpmrt.models.decoder import forward
from cpmrt.models.rope import rope_table
from cpmrt.ops import Rows
from cpmrt.reference.blas_threads import BlasThreads
from cpmrt.reference.ops import NumpyOps
from cpmrt.reference.quantized import Matrix, quantized_arrays
from cpmrt.reference.sampling import sample, token_logprobs


@dataclass(frozen=True)
class Done:
    """A step that was carried out when it was submitted."""

    result: StepResult

    def is_done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self.result


@dataclass
class _Running:
    """The running state of an admitted sequence."""

    admit: Admit
    seen: Array
    counts: Array
    position: int = 0
    last_token: int = -1
    num_generated: int = 0
    finished: bool = False


LoadWeights = Callable[[Mapping[str, Matrix]], None]


class ReferenceExecutor:
    """Runs steps in NumPy. Everything lives in one arena of float32 values that `dtype` could hold.

    `load(weights)` must fill the arrays it is given, by packed name (`models.planning.weight_specs`): float32, or those
    of a quantised weight (`reference.quantized`).
    `position_limit` is the context that was asked for: it picks the rotary table (`models.rope`).
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: MemoryPlan,
        dtype: DType,
        prefill_chunk: int,
        position_limit: int,
        load: LoadWeights,
    ):
        self.config, self.plan = config, plan
        self._layout = layout = KVLayout.of(config, plan.max_context, plan.max_sequences)
        self._limits = ExecutorLimits(
            plan.max_sequences, plan.max_context, prefill_chunk,
            max_logit_bias=config.vocab_size, num_pages=layout.num_pages, page_size=PAGE_SIZE,
        )  # fmt: skip
        self._ops = NumpyOps(dtype)
        arena = Arena(plan, np.zeros(plan.total_bytes, np.uint8))
        self._weights: dict[str, Matrix] = {
            spec.name: quantized_arrays(spec, arena) if spec.quant else arena.array(spec.name, np.float32)
            for spec in plan.tensors
        }
        self._buffers = {
            region.name: arena.array(region.name, np.float32)
            for region in plan.regions
            if region.part not in WEIGHT_PARTS
        }
        self._buffers["rope"][:] = rope_table(config, plan.max_context, position_limit)
        self._block_tables = np.array(layout.block_tables(), np.int32)
        self._threads = BlasThreads(max(weight.size for weight in self._weights.values()))
        self._running: dict[int, _Running] = {}
        self._closed = False
        load(self._weights)

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    def submit(self, step: Step) -> Pending:
        """Carry out the step; the result is ready. Raises NoDeviceError after `close`."""
        self._check_open()
        if isinstance(step, Admit):
            vocab = self.config.vocab_size
            self._set_block_table(step.slot, step.block_table)
            self._running[step.slot] = _Running(step, np.zeros(vocab, bool), np.zeros(vocab, np.int32))
            return Done(StepResult())
        if isinstance(step, Recall):
            self._running[step.slot].seen[list(step.token_ids)] = True
            return Done(StepResult())
        if isinstance(step, Prefill):
            return Done(StepResult((self._prefill(step),)))
        if isinstance(step, Decode):
            return Done(self._decode(step))
        if isinstance(step, Release):
            self._running.pop(step.slot, None)
            return Done(StepResult())
        raise ConfigError("the reference executor does not draft", expected="Decode steps", actual=type(step).__name__)

    def prompt_logits(self, slot: int, token_ids: tuple[int, ...], block_table: tuple[int, ...] = ()) -> Iterator[F32]:
        """Logits of every position, float32 [chunk, V] at a time."""
        chunk = self._limits.prefill_chunk
        self._set_block_table(slot, block_table)
        for start in range(0, len(token_ids), chunk):
            self._check_open()
            tokens = token_ids[start : start + chunk]
            logits = np.empty((len(tokens), self.config.vocab_size), np.float32)
            self._forward(tokens, range(start, start + len(tokens)), (slot,) * len(tokens), True, slice(None), logits)
            yield logits

    def close(self) -> None:
        self._closed = True
        self._weights, self._buffers, self._running = {}, {}, {}

    def _check_open(self) -> None:
        if self._closed:
            raise NoDeviceError("the executor is closed", fix="make a new LLM")

    def _set_block_table(self, slot: int, block_table: tuple[int, ...]) -> None:
        self._layout.check_table(block_table)
        self._block_tables[slot, : len(block_table)] = block_table

    def _prefill(self, step: Prefill) -> SlotResult:
        running = self._running[step.slot]
        running.seen[list(step.token_ids)] = True
        running.position = step.position + len(step.token_ids)
        logits = self._buffers["logits"][:1]
        count = len(step.token_ids)
        positions = range(step.position, running.position)
        last = slice(-1, None) if step.is_last else None
        self._forward(step.token_ids, positions, (step.slot,) * count, True, last, logits)
        return self._sample(running, logits[0]) if step.is_last else SlotResult()

    def _decode(self, step: Decode) -> StepResult:
        active = [slot for slot in step.slots if not self._running[slot].finished]
        if not active:
            return StepResult((SlotResult(),) * len(step.slots))
        rows = [self._running[slot] for slot in active]
        logits = self._buffers["logits"][: len(active)]
        positions = [running.position for running in rows]
        self._forward([r.last_token for r in rows], positions, active, False, slice(None), logits)
        results = {}
        for slot, running, row in zip(active, rows, logits, strict=True):
            running.position += 1
            results[slot] = self._sample(running, row)
        return StepResult(tuple(results.get(slot, SlotResult()) for slot in step.slots))

    def _sample(self, running: _Running, logits: F32) -> SlotResult:
        params = running.admit.sampling
        token = sample(logits, params, running.admit.seed, running.position, running.seen, running.counts)
        running.seen[token] = True
        running.counts[token] += 1
        running.last_token = token
        running.num_generated += 1
        running.finished = (
            token in running.admit.stop_token_ids or running.num_generated == running.admit.max_new_tokens
        )
        count = params.logprobs
        return SlotResult((token,), (token_logprobs(logits, token, count),) if count else ())

    def _forward(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        is_prefill: bool,
        logit_rows: slice | None,
        logits: F32,
    ) -> None:
        rows = Rows(
            np.array(token_ids, np.int64), np.array(positions), np.array(slots), self._block_tables, is_prefill
        )
        count = len(rows.token_ids)
        buffers = {name: self._buffers[name][:count] for name in ("x", "q", "attention", "inner")}
        buffers |= {name: self._buffers[name] for name in ("k_pages", "v_pages", "rope")}
        buffers["logits"] = logits
        with self._threads.for_rows(count):
            forward(self._ops, self.config, self._weights, buffers, rows, logit_rows)

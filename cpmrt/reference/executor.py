"""The reference executor: the shared forward on NumPy ops, one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cpmrt.config import ModelConfig
from cpmrt.dtypes import F32, DType
from cpmrt.errors import ConfigError, NoDeviceError
from cpmrt.executor import (
    Admit,
    Decode,
    ExecutorLimits,
    Pending,
    Prefill,
    Recall,
    SlotResult,
    Speculate,
    Step,
    StepResult,
)
from cpmrt.memory.arena import Arena
from cpmrt.memory.kv_pages import PAGE_SIZE, KVLayout
from cpmrt.memory.plan import WEIGHT_PARTS, MemoryPlan
from cpmrt.models.decoder import forward
from cpmrt.models.draft import Draft
from cpmrt.models.rope import rope_table
from cpmrt.ops import Fp8Pages, Rows
from cpmrt.reference.blas_threads import BlasThreads
from cpmrt.reference.drafting import Drafter
from cpmrt.reference.ops import NumpyOps
from cpmrt.reference.quantized import Matrix, quantized_arrays, rows_of
from cpmrt.reference.running import Running
from cpmrt.reference.tree_step import child_with, keep_path, tree_rows


@dataclass(frozen=True)
class Done:
    """A step that was carried out when it was submitted."""

    result: StepResult

    def is_done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self.result


_ROW_BUFFERS = {"x", "q", "attention", "inner", "blocks", "q_nope"}
_TYPES = {
    "blocks": np.int32, "history": np.int32, "draft.token_map": np.int32, "k_codes": np.uint8, "v_codes": np.uint8,
}  # fmt: skip
LoadWeights = Callable[[Mapping[str, Matrix]], None]


class ReferenceExecutor:
    """Runs steps in NumPy. Everything lives in one arena of float32 values that `dtype` could hold.

    `load(weights)` must fill the arrays it is given, by packed name (`models.planning.weight_specs`): float32, or those
    of a quantised weight (`reference.quantized`).
    `position_limit` is the context that was asked for: it picks the rotary table (`models.rope`). With a `draft` in the
    plan (`drafting.drafting_tables` among its tables) it takes Speculate steps too.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: MemoryPlan,
        dtype: DType,
        prefill_chunk: int,
        position_limit: int,
        load: LoadWeights,
        draft: Draft | None = None,
    ):
        self.config, self.plan = config.for_context(plan.max_context), plan
        self._layout = layout = KVLayout.of(config, plan.max_context, plan.max_sequences)
        self._limits = ExecutorLimits(
            plan.max_sequences, plan.max_context, prefill_chunk,
            tree_shapes=draft.shapes if draft else (), max_logit_bias=config.vocab_size,
            num_pages=layout.num_pages, page_size=PAGE_SIZE,
        )  # fmt: skip
        self._ops = NumpyOps(dtype)
        arena = Arena(plan, np.zeros(plan.total_bytes, np.uint8))
        self._weights: dict[str, Matrix] = {
            spec.name: quantized_arrays(spec, arena) if spec.quant else arena.array(spec.name, np.float32)
            for spec in plan.tensors
        }
        self._buffers = {
            region.name: arena.array(region.name, _TYPES.get(region.name, np.float32))
            for region in plan.regions
            if region.part not in WEIGHT_PARTS
        }
        for name in ("k", "v"):
            if f"{name}_scales" in self._buffers:
                codes, scales = self._buffers.pop(f"{name}_codes"), self._buffers.pop(f"{name}_scales")
                self._buffers[f"{name}_pages"] = Fp8Pages(codes, scales)
        self._buffers["rope"][:] = rope_table(config, plan.max_context, position_limit)
        self._block_tables = np.array(layout.block_tables(), np.int32)
        self._threads = BlasThreads(max(weight.size for weight in self._weights.values()))
        self._running: dict[int, Running] = {}
        self._capacities = np.full(plan.max_sequences, layout.pages_per_sequence * PAGE_SIZE)
        self._closed = False
        load(self._weights)
        self._taps: tuple[int, ...] = ()
        self._drafter: Drafter | None = None
        if draft is not None:
            self._attach(draft, position_limit)

    def _attach(self, draft: Draft, position_limit: int) -> None:
        self._taps = draft.config.taps
        if draft.config.decoder is not None:
            rope = self._buffers["draft.rope"]
            rope[:] = rope_table(draft.config.decoder, self.plan.max_context, position_limit)
        if "draft.fc_halves" in self._weights:
            halves, hidden = self._weights["draft.fc_halves"], self.config.hidden_size
            self._weights["draft.fc_embedding"] = rows_of(halves, slice(0, hidden))
            self._weights["draft.fc_hidden"] = rows_of(halves, slice(hidden, 2 * hidden))
        self._drafter = Drafter(
            draft, self._ops, self._weights, self._buffers, self._block_tables, self._capacities,
            self.plan.max_context, self._threads,
        )  # fmt: skip

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    def submit(self, step: Step) -> Pending:
        """Carry out the step; the result is ready. Raises NoDeviceError after `close`."""
        self._check_open()
        if isinstance(step, Prefill):
            return Done(StepResult((self._prefill(step),)))
        if isinstance(step, Decode):
            return Done(self._decode(step))
        if isinstance(step, Speculate):
            return Done(StepResult((self._speculate(step),)))
        if isinstance(step, Admit):
            self._set_block_table(step.slot, step.block_table)
            self._running[step.slot] = Running.start(step, self.config.vocab_size)
            if self._drafter:
                self._drafter.admit(step.slot)
        elif isinstance(step, Recall):
            self._running[step.slot].seen[list(step.token_ids)] = True
            if self._drafter:
                self._drafter.recall(step.slot, step.token_ids)
        else:
            self._running.pop(step.slot, None)
        return Done(StepResult())

    def prompt_logits(self, slot: int, token_ids: tuple[int, ...], block_table: tuple[int, ...] = ()) -> Iterator[F32]:
        """Logits of every position, float32 [chunk, V] at a time."""
        chunk = self._limits.prefill_chunk
        self._set_block_table(slot, block_table)
        for start in range(0, len(token_ids), chunk):
            self._check_open()
            tokens = token_ids[start : start + chunk]
            logits = np.empty((len(tokens), self.config.vocab_size), np.float32)
            self._forward(self._rows(tokens, range(start, start + len(tokens)), [slot], True), slice(None), logits)
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
        if block_table:
            self._capacities[slot] = len(block_table) * PAGE_SIZE

    def _prefill(self, step: Prefill) -> SlotResult:
        running = self._running[step.slot]
        running.seen[list(step.token_ids)] = True
        running.position = step.position + len(step.token_ids)
        logits = self._buffers["logits"][:1]
        rows = self._rows(step.token_ids, range(step.position, running.position), [step.slot], True)
        self._forward(rows, slice(-1, None) if step.is_last else None, logits)
        # Before the draft's passes, whose memory is that of the logits.
        result = self._sample(step.slot, logits[0]) if step.is_last else SlotResult()
        if self._drafter:
            self._drafter.prefilled(step.slot, step.token_ids, step.position)
        return result

    def _decode(self, step: Decode) -> StepResult:
        active = [slot for slot in step.slots if not self._running[slot].finished]
        if not active:
            return StepResult((SlotResult(),) * len(step.slots))
        states = [self._running[slot] for slot in active]
        if self._drafter:
            for slot, running in zip(active, states, strict=True):
                self._drafter.before_decode(slot, running.position)
        logits = self._buffers["logits"][: len(active)]
        rows = self._rows([r.last_token for r in states], [r.position for r in states], active, False)
        self._forward(rows, slice(None), logits)
        results = {}
        for row, (slot, running) in enumerate(zip(active, states, strict=True)):
            if self._drafter:
                self._drafter.decoded(slot, row)
            running.position += 1
            results[slot] = self._sample(slot, logits[row])
        return StepResult(tuple(results.get(slot, SlotResult()) for slot in step.slots))

    def _speculate(self, step: Speculate) -> SlotResult:
        """Draft a tree, run the target over it, and follow it as long as it is what plain decoding gives."""
        (slot,) = step.slots
        running, drafter = self._running[slot], self._drafter
        if drafter is None:
            raise ConfigError("this executor has no draft", expected="Decode steps", actual="a Speculate step")
        if running.finished:
            return SlotResult()
        base, shape = running.position, self._limits.tree_shapes[step.shape]
        nodes = drafter.propose(slot, base, shape)
        rows = tree_rows(nodes, slot, base, self._capacities[slot], self._limits.max_context, self._block_tables)
        logits = self._buffers["logits"][: shape.tree_size]
        self._forward(rows, slice(None), logits)
        path, results = [0], list[SlotResult]()
        while True:
            running.position += 1
            results.append(self._sample(slot, logits[path[-1]]))
            node = child_with(nodes, rows, path[-1], running.last_token)
            if running.finished or node is None:
                break
            path.append(node)
        keep_path(self._buffers, self._block_tables[slot], base, path, self._ops.dtype)
        drafter.accepted(slot, path)
        tokens = tuple(token for result in results for token in result.token_ids)
        return SlotResult(tokens, tuple(entry for result in results for entry in result.logprobs))

    def _sample(self, slot: int, logits: F32) -> SlotResult:
        running = self._running[slot]
        token = running.sample(logits)
        if self._drafter:
            self._drafter.sampled(slot, running.position, token)
        return SlotResult((token,), running.logprobs(logits, token))

    def _rows(self, token_ids: Sequence[int], positions: Sequence[int], slots: Sequence[int], is_prefill: bool) -> Rows:
        """`slots`: of each row, or the one of all."""
        every_slot = np.broadcast_to(np.array(slots), len(token_ids))
        return Rows(np.array(token_ids, np.int64), np.array(positions), every_slot, self._block_tables, is_prefill)

    def _forward(self, rows: Rows, logit_rows: slice | None, logits: F32) -> None:
        """A pass of the target. What a draft reads of it goes to rows 1 and on of `hidden`."""
        count = len(rows.token_ids)
        buffers = {name: self._buffers[name][:count] for name in _ROW_BUFFERS & self._buffers.keys()}
        buffers |= {name: array for name, array in self._buffers.items() if name.endswith("_pages") or name == "rope"}
        buffers["logits"] = logits
        if "hidden" in self._buffers:
            buffers["hidden"] = self._buffers["hidden"][1 : count + 1]
        with self._threads.for_rows(count):
            forward(self._ops, self.config, self._weights, buffers, rows, logit_rows, self._taps)

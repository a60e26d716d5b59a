"""The reference executor: the shared forward on NumPy ops, one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from cpmrt.config import ModelConfig, TreeShape
from cpmrt.dtypes import F32, Array, DType, round_to
from cpmrt.errors import ConfigError, NoDeviceError
from cpmrt.executor import (
    MAX_ROWS,
    Admit,
    Decode,
    ExecutorLimits,
    Keep,
    Mask,
    Pending,
    Prefill,
    Recall,
    SlotResult,
    Speculate,
    Step,
    StepResult,
)
from cpmrt.memory.arena import Arena
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.memory.plan import MemoryPlan
from cpmrt.models import decoder
from cpmrt.models import draft as drafts
from cpmrt.models.decoder import Decoder
from cpmrt.models.draft import Draft
from cpmrt.models.layers import Table
from cpmrt.ops import MappedWeight, Rows
from cpmrt.reference.blas_threads import BlasThreads
from cpmrt.reference.draft_tree import Nodes
from cpmrt.reference.drafting import Drafter, Target, bound_model, keep_path
from cpmrt.reference.inner_draft import ChainDrafter
from cpmrt.reference.ops import NumpyOps
from cpmrt.reference.quantized import Matrix, quantized_arrays
from cpmrt.reference.running import Running
from cpmrt.reference.sampling import is_usable, masked

_MAX_DRAFTING = 8
"""The most sequences that one step drafts for."""


@dataclass(frozen=True)
class Done:
    """A step that was carried out when it was submitted."""

    result: StepResult

    def is_done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self.result


LoadWeights = Callable[[Mapping[str, Matrix]], None]


class ReferenceExecutor:
    """Runs steps in NumPy. All arrays of the plan are in one arena; `mapped` weights stay in their files. Weights and
    activations that are not quantised are float32 values that `dtype` can hold.

    `load(weights)` must fill the arrays it is given, by packed name (`models.planning.weight_specs`): float32, or those
    of a quantised weight (`reference.quantized`). `ops` may be replaced by other bodies, to watch a forward.
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
        mapped: Mapping[str, MappedWeight] = MappingProxyType({}),
    ):
        self.config, self.plan = config.for_context(plan.max_context), plan
        self._layout = layout = plan.caches
        self._limits = ExecutorLimits(
            plan.max_sequences, plan.max_context, config.chunk_of(prefill_chunk),
            tree_shapes=draft.shapes if draft else (), max_logit_bias=config.vocab_size,
            num_pages=layout.num_pages, page_size=PAGE_SIZE, takes_masks=True, takes_tree_masks=True,
            max_drafting=(_MAX_DRAFTING,) * len(draft.shapes) if draft else (), num_snapshots=layout.num_snapshots,
            certain_rows=0 if layout.has_state else min(MAX_ROWS, max(prefill_chunk, plan.max_sequences)),
        )  # fmt: skip
        self.ops = NumpyOps(dtype)
        arrays = Arena(plan, np.zeros(plan.total_bytes, np.uint8)).arrays()
        weights: dict[str, Matrix] = {**mapped}
        for spec in plan.tensors:
            if spec.name not in mapped:
                weights[spec.name] = quantized_arrays(spec, arrays) if spec.quant else arrays[spec.name]
        self._arrays: dict[str, Any] = arrays | weights
        self._fill(decoder.tables(self.config, plan.max_context, position_limit))
        self.block_tables = np.array(layout.block_tables(), np.int32)
        self._threads = BlasThreads(max(weight.size for weight in weights.values()))
        self._running: dict[int, Running] = {}
        self._capacities = np.full(plan.max_sequences, layout.pages_per_sequence * PAGE_SIZE)
        self._closed = False
        load(weights)
        self._model = Decoder.bind(self.config, self._arrays, layout, draft.config.taps if draft else ())
        self._drafter: Drafter | None = None
        if draft is not None:
            self._fill(drafts.tables(draft, plan.max_context, position_limit))
            self._drafter = self._make_drafter(draft)

    def _fill(self, tables: Iterable[Table]) -> None:
        for table in tables:
            for part, values in table.parts(self._arrays[table.spec.name], partial(round_to, dtype=self.ops.dtype)):
                part[:] = values

    def _make_drafter(self, draft: Draft) -> Drafter:
        arrays, caches = self._arrays, self.plan.draft_caches
        taps = draft.inner.config.taps if draft.inner else ()
        drafter = Drafter(
            draft, bound_model(draft, arrays, caches, taps), Target(self._tree_logits, self._sample, self._keep),
            self.ops, arrays, self.block_tables, self._capacities, self.plan.max_context, self._threads,
        )  # fmt: skip
        if draft.inner is not None and caches is not None:
            drafter.chains = ChainDrafter(drafter, caches, self.plan.inner_caches)
        return drafter

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    def array(self, name: str) -> Array:
        """Return an array of the memory plan by name, for tests and tools that look inside."""
        found: Array = self._arrays[name]
        return found

    def proposed(self, slot: int, shape: TreeShape) -> Nodes:
        """Return the tree that a speculative step of an admitted slot would verify now, for tests that look inside."""
        assert self._drafter is not None
        return self._drafter.proposed(slot, self._running[slot], shape)

    @property
    def num_draft_passes(self) -> int:
        """The number of passes of the draft that have given logits so far; blocks and an inner draft do not count."""
        return 0 if self._drafter is None else self._drafter.num_passes

    def submit(self, step: Step) -> Pending:
        """Carry out the step; the result is ready. Raises NoDeviceError after `close`."""
        self._check_open()
        with np.errstate(all="ignore"):  # logits that are not finite are reported in the result
            return self._carry_out(step)

    def _carry_out(self, step: Step) -> Pending:
        if isinstance(step, Prefill):
            return Done(StepResult((self._prefill(step),)))
        if isinstance(step, Decode):
            return Done(self._decode(step))
        if isinstance(step, Speculate):
            return Done(StepResult(tuple(self._speculate(step, slot) for slot in step.slots)))
        if isinstance(step, Admit):
            self._set_block_table(step.slot, step.block_table)
            self._begin_state(step.slot, step.snapshot)
            self._running[step.slot] = Running.start(step, self.config.vocab_size)
            if self._drafter:
                self._drafter.admit(step.slot)
        elif isinstance(step, Keep):
            for state, snapshots in self._layout.states(self._arrays):
                snapshots[:, step.snapshot] = state[:, step.slot]
        elif isinstance(step, Recall):
            self._running[step.slot].seen[list(step.token_ids)] = True
            if self._drafter:
                self._drafter.recall(step.slot, step.token_ids)
        else:
            self._running.pop(step.slot, None)
        return Done(StepResult())

    def prompt_logits(self, slot: int, token_ids: tuple[int, ...], block_table: tuple[int, ...] = ()) -> Iterator[F32]:
        """Yield the logits of every position, float32 [chunk, V] at a time."""
        for rows in self._prompt_rows(slot, token_ids, block_table):
            logits = np.empty((len(rows.token_ids), self.config.vocab_size), np.float32)
            with np.errstate(all="ignore"):
                self._forward(rows, slice(None), logits)
            yield logits

    def prompt_states(self, slot: int, token_ids: tuple[int, ...], block_table: tuple[int, ...] = ()) -> Iterator[F32]:
        """Yield the final norm's output at every position, float32 [chunk, H] at a time."""
        for rows in self._prompt_rows(slot, token_ids, block_table):
            states = np.empty((len(rows.token_ids), self.config.hidden_size), np.float32)
            with np.errstate(all="ignore"):
                x = self._forward(rows, None, self._arrays["logits"])
                self.ops.rms_norm(states, x, self._model.norm, self.config.rms_norm_eps)
            yield states

    def _prompt_rows(self, slot: int, token_ids: tuple[int, ...], block_table: tuple[int, ...]) -> Iterator[Rows]:
        """Yield the rows of a prompt chunk after chunk, in a slot that nobody holds."""
        chunk = self._limits.prefill_chunk
        self._set_block_table(slot, block_table)
        self._begin_state(slot, None)
        for start in range(0, len(token_ids), chunk):
            self._check_open()
            tokens = token_ids[start : start + chunk]
            yield self._rows(tokens, range(start, start + len(tokens)), [slot], True)

    def read_pages(self, pages: Sequence[int]) -> dict[str, Array]:
        """Return a copy of the pages' contents, by cache: [layers, pages, ...]."""
        self._check_open()
        return {name: array[:, list(pages)] for name, array in self.plan.paged(self._arrays).items()}

    def write_pages(self, pages: Sequence[int], contents: Mapping[str, Array]) -> None:
        """Fill pages with contents that `read_pages` returned."""
        self._check_open()
        for name, array in self.plan.paged(self._arrays).items():
            array[:, list(pages)] = contents[name]

    def close(self) -> None:
        """Let go of all arrays, so that their memory is free even while somebody still holds the executor."""
        if not self._closed:
            self._closed, self._drafter = True, None
            self._arrays, self._running = {}, {}
            del self._model

    def _check_open(self) -> None:
        if self._closed:
            raise NoDeviceError("the executor is closed", fix="make a new LLM")

    def _set_block_table(self, slot: int, block_table: tuple[int, ...]) -> None:
        self._layout.check_table(block_table)
        self.block_tables[slot, : len(block_table)] = block_table
        if block_table:
            self._capacities[slot] = len(block_table) * PAGE_SIZE

    def _begin_state(self, slot: int, snapshot: int | None) -> None:
        for state, snapshots in self._layout.states(self._arrays):
            state[:, slot] = 0 if snapshot is None else snapshots[:, snapshot]

    def _prefill(self, step: Prefill) -> SlotResult:
        self._running[step.slot].seen[list(step.token_ids)] = True
        return self._chunk(step.slot, step.token_ids, step.position, step.is_last, step.mask)

    def _chunk(self, slot: int, token_ids: tuple[int, ...], start: int, samples: bool, mask: Mask | None) -> SlotResult:
        """Run tokens that stand at `start` and on, and sample the one after them if `samples`."""
        position = self._running[slot].position = start + len(token_ids)
        logits = self._arrays["logits"][:1]
        rows = self._rows(token_ids, range(start, position), [slot], True)
        self._forward(rows, slice(-1, None) if samples else None, logits)
        # The token is sampled before the draft's passes, which use the memory in which the logits are.
        result = self._sample(slot, logits[0], mask.bits if mask else None) if samples else SlotResult()
        if self._drafter:
            self._drafter.prefilled(slot, token_ids, start)
        return result

    def _decode(self, step: Decode) -> StepResult:
        given = dict.fromkeys(step.slots, ()) | dict(zip(step.slots, step.certain, strict=False))
        certain = {slot: tokens for slot, tokens in given.items() if not self._running[slot].finished}
        if not certain:
            return StepResult((SlotResult(),) * len(step.slots))
        if self._drafter:
            counts = {slot: 1 + len(tokens) for slot, tokens in certain.items()}
            self._drafter.decoding({slot: self._running[slot].position for slot in certain}, counts)
        rows, logits = self._decode_rows(certain), self._arrays["logits"][: len(certain)]
        newest = np.cumsum([1 + len(tokens) for tokens in certain.values()]) - 1
        self._forward(rows, newest, logits)
        if self._drafter:
            self._drafter.decoded(rows.slots.tolist())
        results, masks = {}, dict(zip(step.slots, step.masks, strict=False))
        for (slot, tokens), row in zip(certain.items(), logits, strict=True):
            mask = masks.get(slot)
            found = self._sample(slot, row, mask.bits if mask else None)
            results[slot] = replace(found, token_ids=(*tokens, *found.token_ids))
        return StepResult(tuple(results.get(slot, SlotResult()) for slot in step.slots))

    def _decode_rows(self, certain: Mapping[int, tuple[int, ...]]) -> Rows:
        """Return the rows of a decode step: of each slot its last token, then the certain tokens that the step brings.

        Each slot's position moves on to that of the token to be sampled.
        """
        tokens, positions, slots = list[int](), list[int](), list[int]()
        for slot, behind in certain.items():
            running = self._running[slot]
            tokens += running.last_token, *behind
            positions += range(running.position, running.position + 1 + len(behind))
            slots += [slot] * (1 + len(behind))
            for token in behind:
                running.position += 1
                running.generated(token)
                if self._drafter:
                    self._drafter.sampled(slot, running.position, token)
            running.position += 1
        return self._rows(tokens, positions, slots, False)

    def _speculate(self, step: Speculate, slot: int) -> SlotResult:
        running = self._running[slot]
        if self._drafter is None:
            raise ConfigError("this executor has no draft", expected="Decode steps", actual="a Speculate step")
        if running.finished:
            return SlotResult()
        results = self._drafter.speculate(slot, running, self._limits.tree_shapes[step.shape], step.masks)
        tokens = tuple(token for result in results for token in result.token_ids)
        logprobs = tuple(entry for result in results for entry in result.logprobs)
        return replace(results[-1], token_ids=tokens, logprobs=logprobs)

    def _tree_logits(self, rows: Rows) -> F32:
        logits: F32 = self._arrays["logits"][: len(rows.token_ids)]
        self._forward(rows, slice(None), logits)
        return logits

    def _keep(self, slot: int, base: int, path: Sequence[int]) -> None:
        layers = zip(self._layout.layers, self._model.layers.layers, strict=True)
        made = ("recompute", "encode")
        pages = (layer.mixer.pages for caches, layer in layers if any(spec.on_accept in made for spec in caches))
        keep_path(self._layout.moved(self._arrays), pages, self.block_tables[slot], base, path, self.ops.dtype)
        if self._model.layers.restoring:
            assert list(path) == list(range(len(path))), "a recurrent state follows chains alone"
            self._model.layers.restore(self.ops, self._arrays, (slot, len(path)))

    def _sample(self, slot: int, logits: F32, bits: bytes | None) -> SlotResult:
        """Sample the sequence's next token among those of `bits` (`executor.Mask`)."""
        running, allowed = self._running[slot], masked(logits, bits)
        if not (is_usable(logits) and is_usable(allowed)):
            running.finished = True
            are_numbers = bits is not None and bool(np.max(logits) < np.inf)
            return SlotResult(mask_failure="nothing") if are_numbers else SlotResult(non_finite=True)
        token = running.sample(allowed)
        if self._drafter:
            self._drafter.sampled(slot, running.position, token)
        return SlotResult((token,), running.logprobs(logits, token))

    def _rows(self, token_ids: Sequence[int], positions: Sequence[int], slots: Sequence[int], is_prefill: bool) -> Rows:
        """Return the rows of a step; `slots` has the slot of each row, or one slot for all."""
        every_slot = np.broadcast_to(np.array(slots), len(token_ids))
        return Rows(np.array(token_ids, np.int64), np.array(positions), every_slot, self.block_tables, is_prefill)

    def _forward(self, rows: Rows, logit_rows: slice | Array | None, logits: F32) -> F32:
        """Return the output of the target's layers, and fill `logits` with those of `logit_rows` (None: of none).

        The states that a draft reads go to rows 1 and on of the array `hidden`.
        """
        count, hidden = len(rows.token_ids), self._arrays.get("hidden")
        with self._threads.for_step():
            states = None if hidden is None else hidden[1 : count + 1]
            x: F32 = self._model.forward(self.ops, self._arrays, rows, states)
            if logit_rows is not None:
                self._model.logits(self.ops, logits, x[logit_rows])
        return x

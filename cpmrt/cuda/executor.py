"""The CUDA executor: whole steps as graph replays, state on the device, two rings to the host."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from threading import local
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from cpmrt.config import EngineConfig
from cpmrt.cuda.arena import held_arrays
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.modules import Modules
from cpmrt.cuda.driver.context import await_setup
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.driver.device_memory import DeviceBuffer
from cpmrt.cuda.driver.faults import device_faults
from cpmrt.cuda.driver.graphs import Graphs
from cpmrt.cuda.load.page_copies import read_pages, write_pages
from cpmrt.cuda.load.repack import Destination
from cpmrt.cuda.load.tables import fill, fill_tables
from cpmrt.cuda.ops.cuda_ops import CudaOps
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.ops.linear import ROW_BUCKETS
from cpmrt.cuda.ops.screened_head import can_screen
from cpmrt.cuda.ops.slot_states import SlotStates
from cpmrt.cuda.step.forward import StepForward
from cpmrt.cuda.step.kernels import StepKernels, step_modules
from cpmrt.cuda.step.launches import masked_launches, run_on_padding, step_launches
from cpmrt.cuda.step.lengths import Lengths
from cpmrt.cuda.step.masks import MaskedGraphs, MaskRing
from cpmrt.cuda.step.memory import buckets, certain_rows, row_counts
from cpmrt.cuda.step.prompt_passes import PromptPasses
from cpmrt.cuda.step.rings import Nothing, Rings, WithCertain
from cpmrt.cuda.step.structs import DECODE, MAX_LOGIT_BIAS
from cpmrt.dtypes import F32, Array
from cpmrt.errors import ConfigError, NoDeviceError
from cpmrt.executor import (
    Admit,
    Decode,
    ExecutorLimits,
    Keep,
    Mask,
    Pending,
    Prefill,
    Recall,
    Speculate,
    Step,
)
from cpmrt.memory.arena import Arena
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.memory.plan import MemoryPlan
from cpmrt.models import decoder
from cpmrt.opening import Blueprint
from cpmrt.ops import ANY_ROWS, RowKind

if TYPE_CHECKING:
    from cpmrt.cuda.draft.speculation import Speculation

LoadWeights = Callable[[Destination], None]
_RUN_AHEAD = 4


class CudaExecutor:
    """Runs steps on one GPU. Everything lives in one arena laid out by `plan` (itemsize 2, `step.memory.cuda_needs`).

    `load` fills all weights. With `cuda_graphs` False in the settings kernels are launched one by one, with the same
    bits.
    """

    def __init__(self, blueprint: Blueprint, plan: MemoryPlan, device: Device, load: LoadWeights):
        engine, draft = blueprint.settings, blueprint.draft
        self.config, self._draft = blueprint.config.for_context(plan.max_context), draft
        self.plan, self.device = plan, device
        self._layout = layout = plan.caches
        self._limits = ExecutorLimits(
            plan.max_sequences, plan.max_context, self.config.chunk_of(engine.prefill_chunk),
            max(_RUN_AHEAD, 2 * engine.steps_per_launch), max_logit_bias=MAX_LOGIT_BIAS, num_pages=layout.num_pages,
            page_size=PAGE_SIZE, tree_shapes=draft.shapes if draft else (), takes_masks=True, takes_tree_masks=True,
            num_snapshots=layout.num_snapshots, remakes_answers=True,
            certain_rows=certain_rows(self.config, engine, layout), row_sizes=ROW_BUCKETS,
        )  # fmt: skip
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._modules, self._dtype = Modules(device.arch, blueprint.dtype), blueprint.dtype
        self._buckets, self._row_counts = buckets(engine.prefill_chunk), row_counts(engine.max_sequences)
        self._masked_counts = row_counts(max(engine.max_sequences, self._limits.certain_rows))
        self._num_logprobs: dict[int, int] = {}
        self._screened: set[int] = set()
        """Slots of sequences for which it pays to screen the head."""
        sparse = self.config.sparse
        self._lengths = Lengths(self._limits.tree_shapes, sparse.dense_context if sparse else 0)
        self._closed, self._resources = False, ExitStack()
        self._threads = local()
        """Values of each calling thread: `is_current`, once the device is current there."""
        try:
            with device_faults():
                self._start(engine, blueprint.position_limit, load)
        except BaseException:
            self._resources.close()
            raise

    def _start(self, engine: EngineConfig, position_limit: int, load: LoadWeights) -> None:
        """Allocate the arena, load weights and capture graphs."""
        memory = DeviceBuffer(self.plan.total_bytes)
        self._resources.callback(memory.close)
        self._arena = Arena(self.plan, cupy.ndarray((self.plan.total_bytes,), cupy.uint8, memory.pointer))
        self._make_parts(engine)
        # Loading comes first: its staging area may have the same memory as tables, which are filled after it.
        regions = {region.name: region for region in self.plan.regions}
        loader = Launcher(self.stream, self._modules, use_pdl=False)
        load(Destination(memory.pointer.ptr, regions, self.device, loader))
        self._fill_tables(position_limit)
        self._capture(loops=engine.steps_per_launch > 1)
        if self._speculation is not None:
            from cpmrt.cuda.step.costs import measured_limits  # no start without a draft needs it

            counts = self._speculation.counts if engine.drafts_adaptively else ()
            self._limits = measured_limits(self, self._speculation.pass_seconds, engine.steps_per_launch, counts)

    def _make_parts(self, engine: EngineConfig) -> None:
        """Make whatever launches on the arena. What has to be closed goes into `_resources`."""
        plan, device = self.plan, self.device
        self._arrays: dict[str, Any] = held_arrays(self._arena, device)
        use_pdl = engine.dependent_launch and not device.is_portable
        self._launcher = launcher = Launcher(self.stream, self._modules, use_pdl=use_pdl)
        self._graphs = Graphs(
            self.stream, enabled=engine.cuda_graphs, steps_per_launch=engine.steps_per_launch, release=launcher.release
        )
        self._resources.callback(self._graphs.close)
        self._rings = Rings(
            self.stream, self._buckets[-1], self._layout.pages_per_sequence, self.config.vocab_size
        )  # fmt: skip
        self._resources.callback(self._rings.close)
        self._gemm = Gemm(device, launcher, self._arrays["gemm_workspace"], use_library=not device.is_portable)
        self._resources.callback(self._gemm.close)
        taps = self._draft.config.taps if self._draft else ()
        self._forward = StepForward(
            self.config, device, launcher, self._gemm, self._arrays, plan.caches, taps, self._rings.addresses[1]
        )
        self._row_kinds = {count: self._forward.row_kinds(count) for count in self._row_counts}
        self._prompts = PromptPasses(self.config, self._forward, self._arrays, self._dtype, self.stream)
        self._slot_states = SlotStates(launcher, plan.caches.states(self._arrays))
        self._steps = StepKernels(launcher, self.config, self._arrays, self._rings, device)
        self._speculation: Speculation | None = None
        if self._draft is not None:
            from cpmrt.cuda.draft.speculation import Speculation  # no start without a draft needs it

            self._speculation = Speculation(
                self._draft, self.config, device, launcher, self._gemm, self._arrays, self._rings, self._forward,
                plan, self._graphs.loop,
            )  # fmt: skip
            self._resources.callback(self._speculation.close)
            self._limits = replace(self._limits, max_drafting=self._speculation.most)

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    @property
    def ops(self) -> CudaOps:
        """The ops of the target's forward, for tools that watch or time them."""
        return self._forward.ops

    def submit(self, step: Step) -> Pending:
        """Start the step. Raises RequestError for what the device cannot hold, NoDeviceError after `close`."""
        self._check_open()
        self._lengths.add(step)
        if isinstance(step, Decode):
            slots = step.slots
            if self._speculation is not None:
                self._speculation.make_room(self._graphs, step)
            if any(step.masks) or any(step.certain):
                return self._submit_masked(step)
            self._rings.write_slots(DECODE, slots)
            num_rows, kind, is_screened = self._decode_form(slots)
            start = self._graphs.run_step(("decode", num_rows, kind, is_screened), slots)
            return self._rings.sent(len(slots), self._logprobs_of(slots), start, is_screened=is_screened)
        if isinstance(step, Speculate):
            return self._submit_speculate(step)
        if isinstance(step, Admit):
            self._layout.check_table(step.block_table)
            self._rings.write(step)
            self._num_logprobs.pop(step.slot, None)
            if step.sampling.logprobs:
                self._num_logprobs[step.slot] = step.sampling.logprobs
            (self._screened.add if can_screen(step.sampling) else self._screened.discard)(step.slot)
            self._graphs.run("admit")
            self._slot_states.begin(step.slot, step.snapshot)
            if self._speculation is not None:
                self._speculation.admitted(step.slot)
            return self._rings.sent(1, ())
        if isinstance(step, Prefill):
            return self._submit_prefill(step)
        if isinstance(step, Recall):
            self._rings.write(step)
            self._graphs.run("recall")
            return self._rings.sent(1, ())
        if isinstance(step, Keep):
            self._graphs.flush()
            self._slot_states.keep(step.slot, step.snapshot)
        return Nothing()

    def _decode_form(self, slots: tuple[int, ...]) -> tuple[int, RowKind, bool]:
        """Return the row count and the row kind of the graph that decodes these slots without masks, and whether it
        screens the head."""
        num_rows = _at_least(len(slots), self._row_counts)
        is_screened = self._forward.has_screen(num_rows) and self._screened.issuperset(slots)
        return num_rows, self._lengths.narrowest(self._row_kinds[num_rows], slots, num_rows), is_screened

    def _submit_masked(self, step: Decode) -> Pending:
        """Start a decode step some of whose slots have masks or bring certain tokens."""
        certain, masks = step.certain or ((),) * len(step.slots), step.masks or (None,) * len(step.slots)
        self._rings.write_certain(step.slots, certain)
        if not any(certain):
            num_rows = _at_least(len(masks), self._row_counts)
            self._run_masked(masks, self._lengths.narrowest(self._row_kinds[num_rows], step.slots, num_rows))
            return self._rings.sent(len(masks), self._logprobs_of(step.slots))
        rows, num_logprobs = list[Mask | None](), list[int]()
        of_slots = zip(certain, masks, self._logprobs_of(step.slots), strict=True)
        for tokens, mask, count in of_slots:
            rows += *(None,) * len(tokens), mask
            num_logprobs += *(0,) * len(tokens), count
        self._run_masked(rows)
        return WithCertain(self._rings.sent(len(rows), tuple(num_logprobs)), certain)

    def _run_masked(self, masks: Sequence[Mask | None], kind: RowKind = ANY_ROWS) -> None:
        """Start the decode step whose command is written. Its rows have these `masks` and are all of this kind."""
        self._masked.masks.write(self._rings.next_number, masks)
        self._masked.run_decode(_at_least(len(masks), self._masked_counts), kind)

    def _submit_prefill(self, step: Prefill) -> Pending:
        if step.is_last and step.mask is not None:
            self._masked.prepare_first()
        self._rings.write(step)
        bucket = _at_least(len(step.token_ids), self._buckets)
        self._graphs.run(("prefill", bucket))
        if step.is_last and step.mask is not None:
            self._masked.masks.write(self._rings.next_number, (step.mask,))
            self._masked.run_first()
        elif step.is_last:
            self._graphs.run("first")
        if self._speculation is not None:
            self._speculation.prefilled(self._graphs, step.slot, bucket)
        return self._rings.sent(1, self._logprobs_of((step.slot,)))

    @cached_property
    def _masked(self) -> MaskedGraphs:
        """The graphs of steps with masks and their ring of masks, made when the first such step is submitted."""
        masks = MaskRing(self._masked_counts[-1], self.config.vocab_size)
        self._resources.callback(masks.close)
        after_decode = None if self._speculation is None else self._speculation.after_decode
        launches = masked_launches(self._steps, self._forward, masks, after_decode)
        return MaskedGraphs(self._graphs, masks, self._prepare_rows, self._row_kinds, *launches)

    def _prepare_rows(self, num_rows: int) -> None:
        """Compile and load the kernels of a decode step of `num_rows` rows."""
        if num_rows not in self._row_counts:
            decode = partial(self._forward.decode, num_rows)
            run_on_padding(self._launcher, self._graphs, self._arrays["slots"][:num_rows], decode)

    def _submit_speculate(self, step: Speculate) -> Pending:
        if self._speculation is None:
            raise ConfigError("nothing drafts", expected="Decode steps", actual="Speculate", fix="give LLM a draft")
        kind = self._lengths.narrowest(self._forward.tree_kinds, step.slots, len(step.slots))
        may_screen = self._screened.issuperset(step.slots)
        num_logprobs = self._logprobs_of(step.slots)
        answer = self._speculation.speculate(self._graphs, step, num_logprobs, kind, may_screen=may_screen)
        return self._lengths.followed(step, answer)

    def prompt_logits(self, slot: int, token_ids: tuple[int, ...], block_table: tuple[int, ...] = ()) -> Iterator[F32]:
        """Yield the logits of every position, float32 [chunk, V] at a time."""
        return self._prompt_chunks(slot, token_ids, block_table, self._prompts.logits)

    def prompt_states(self, slot: int, token_ids: tuple[int, ...], block_table: tuple[int, ...] = ()) -> Iterator[F32]:
        """Yield the final norm's output at every position, float32 [chunk, H] at a time; the host computes the norm."""
        return self._prompt_chunks(slot, token_ids, block_table, self._prompts.states)

    def _prompt_chunks(
        self, slot: int, token_ids: tuple[int, ...], block_table: tuple[int, ...], read: Callable[[int], F32]
    ) -> Iterator[F32]:
        """Run a prompt chunk by chunk in a slot that no sequence holds, and yield `read(num_tokens)` after each."""
        self._layout.check_table(block_table)
        self._begin_beside_steps()
        with device_faults():
            self._prompts.set_table(slot, block_table)
            self._slot_states.begin(slot, None)
        for start in range(0, len(token_ids), self._limits.prefill_chunk):
            self._check_open()
            with device_faults():
                tokens = token_ids[start : start + self._limits.prefill_chunk]
                self._prompts.run(slot, tokens, start, _at_least(len(tokens), self._buckets))
                found = read(len(tokens))
            yield found

    def read_pages(self, pages: Sequence[int]) -> dict[str, Array]:
        """Return the contents of pages after all steps so far, by the cache's name: [layers, pages, ...]."""
        self._begin_beside_steps()
        with device_faults():
            return read_pages(self.plan.paged(self._arrays), pages, self.stream)

    def write_pages(self, pages: Sequence[int], contents: Mapping[str, Array]) -> None:
        """Fill pages, for the steps that are submitted from now on."""
        self._begin_beside_steps()
        with device_faults():
            write_pages(self.plan.paged(self._arrays), pages, contents, self.stream)

    def close(self) -> None:
        """Free graphs, arena and host memory. After a fault of the device its context has no memory left to free."""
        if self._closed:
            return
        self._closed = True
        try:
            self._make_current()
            self.stream.synchronize()
        except cupy.cuda.runtime.CUDARuntimeError:
            return  # the context is lost, and all its memory with it
        self._resources.close()
        self._arrays = {}
        del self._arena, self._forward, self._prompts, self._steps

    def _logprobs_of(self, slots: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many logprobs the sequence of each slot asked for; mostly none does."""
        if not self._num_logprobs:
            return (0,) * len(slots)
        return tuple(self._num_logprobs.get(slot, 0) for slot in slots)

    def _check_open(self) -> None:
        if self._closed:
            raise NoDeviceError("the executor is closed", fix="make a new LLM")
        self._make_current()

    def _begin_beside_steps(self) -> None:
        """Launch the steps that wait in the queue: they may still write to a slot or a page that is free by now."""
        self._check_open()
        self._graphs.flush()

    def _make_current(self) -> None:
        """Make the device current in the calling thread: unlike the runtime's calls, the driver's need that."""
        if not hasattr(self._threads, "is_current"):
            cupy.cuda.runtime.setDevice(self.device.index)
            self._threads.is_current = True

    def _fill_tables(self, position_limit: int) -> None:
        with self.stream:
            for region in self.plan.regions:
                if region.zeroed:
                    self._arrays[region.name].fill(0)
            fill(self._arrays["slots"], -1)
            if self._speculation is not None:
                self._speculation.fill_tables(self._layout.pages_per_sequence * PAGE_SIZE, position_limit)
            self._arrays["block_tables"].set(np.array(self._layout.block_tables(), np.int32))
            if "expanded_tables" in self._arrays:
                fill(self._arrays["expanded_tables"], np.arange(self._layout.pages_per_sequence))
            tables = decoder.tables(self.config, self.plan.max_context, position_limit)
            fill_tables(tables, self._arrays, self._dtype)
        self.stream.synchronize()

    def _capture(self, *, loops: bool) -> None:
        """Compile the kernels of every shape, run each shape once on padding rows to load them, then capture graphs."""
        with self._launcher.recording() as modules:
            self._every_shape()
        modules.extend((*step_modules(self.config, self.device), *self._slot_states.modules()))
        if self._speculation is not None:
            modules.extend(self._speculation.modules())
        self._modules.compile(modules)
        self._every_shape()
        self._steps.load(loops=loops)
        self._slot_states.load()
        if self._speculation is not None:
            self._speculation.load()
        await_setup()
        self.stream.synchronize()
        graphs, steps = self._graphs, self._steps
        after_decode = None if self._speculation is None else self._speculation.after_decode
        launches = step_launches(steps, self._forward, self._buckets, self._row_counts, after_decode)
        for name, launch in launches.items():
            if isinstance(name, tuple) and name[0] == "decode":
                graphs.add_step(name, launch, partial(steps.loop_end, name[1], name[1]))
            else:
                graphs.add(name, launch)
        if self._speculation is not None:
            self._speculation.add_graphs(graphs, self._buckets, steps.loop_end)
        self.stream.synchronize()

    def _every_shape(self) -> None:
        self._forward.of_each_kind().every_shape(self._buckets, self._row_counts)
        if self._speculation is not None:
            self._speculation.every_shape(self._buckets)


def _at_least(count: int, sizes: tuple[int, ...]) -> int:
    return sizes[bisect_left(sizes, count)]

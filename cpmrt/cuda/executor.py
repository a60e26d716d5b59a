"""The CUDA executor: whole steps as graph replays, state on the device, two rings to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cupy
import numpy as np

from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.cuda.attention_plan import plan_decode_attention, plan_prefill_attention
from cpmrt.cuda.compiler import Modules, compile_all
from cpmrt.cuda.device import Device
from cpmrt.cuda.gemm import Gemm
from cpmrt.cuda.graphs import Graphs
from cpmrt.cuda.launcher import Launcher
from cpmrt.cuda.linear_plan import DeviceLimits
from cpmrt.cuda.ops import CudaOps
from cpmrt.cuda.rings import Nothing, Rings
from cpmrt.cuda.slot_state import write_admit, write_prefill
from cpmrt.cuda.step_kernels import StepKernels
from cpmrt.cuda.workspace import MAX_ROWS, buckets, row_counts
from cpmrt.dtypes import F32, DType
from cpmrt.errors import ConfigError, NoDeviceError
from cpmrt.executor import Admit, Decode, ExecutorLimits, Pending, Prefill, Release, Step
from cpmrt.memory.arena import Arena
from cpmrt.memory.kv_pages import KVLayout
from cpmrt.memory.plan import WEIGHT_PARTS, MemoryPlan
from cpmrt.models.decoder import forward, lm_head
from cpmrt.models.rope import rope_table
from cpmrt.ops import Rows

LoadWeights = Callable[[int, Mapping[str, Any], Device, Modules, Any], None]
_RUN_AHEAD = 4
_ROW_BUFFERS = ("x", "q", "attention", "inner")
_TYPES = {
    "rope": np.float32, "logits": np.float32, "attention_partials": np.float32, "block_tables": np.int32,
    "attention_arrivals": np.int32, "token_ids": np.int32, "positions": np.int32, "slots": np.int32,
    "chunk": np.int32, "token_counts": np.uint32, "slot_states": np.uint8, "step_context": np.uint64,
    "gemm_workspace": np.uint8,
}  # fmt: skip


class CudaExecutor:
    """Runs steps on one GPU. Everything lives in one arena laid out by `plan` (itemsize 2, `workspace.cuda_needs`).

    `load(arena address, regions by name, device, modules, stream)` fills the weights. `position_limit` is the context
    that was asked for. `engine.cuda_graphs` False launches kernel by kernel, with the same bits.
    """

    def __init__(
        self,
        config: ModelConfig,
        engine: EngineConfig,
        plan: MemoryPlan,
        device: Device,
        dtype: DType,
        position_limit: int,
        load: LoadWeights,
    ):
        self.config, self.plan, self.device = config, plan, device
        self._limits = ExecutorLimits(plan.max_sequences, plan.max_context, engine.prefill_chunk, _RUN_AHEAD)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._modules = Modules(device.arch, dtype)
        self._buckets, self._row_counts = buckets(engine.prefill_chunk), row_counts(engine.max_sequences)
        self._num_logprobs: dict[int, int] = {}
        self._memory = cupy.cuda.Memory(plan.total_bytes)
        pointer = cupy.cuda.MemoryPointer(self._memory, 0)
        self._arena = Arena(plan, cupy.ndarray((plan.total_bytes,), cupy.uint8, pointer))
        self._arrays = {
            region.name: self._arena.array(region.name, _TYPES.get(region.name, np.uint16)) for region in plan.regions
        }
        self._weights = {name: self._arrays[name] for name in self._arrays if plan.region(name).part in WEIGHT_PARTS}
        self._rings = Rings(self._stream, self._buckets[-1])
        self._launcher = launcher = Launcher(self._stream, self._modules, use_pdl=engine.dependent_launch)
        self._gemm = Gemm(device, launcher, self._arrays["gemm_workspace"])
        self._ops = self._make_ops(launcher)
        self._steps = StepKernels(launcher, config, self._arrays, self._rings)
        self._fill_tables(position_limit)
        load(pointer.ptr, {region.name: region for region in plan.regions}, device, self._modules, self._stream)
        self._graphs = Graphs(self._stream, enabled=engine.cuda_graphs)
        self._capture()
        self._closed = False

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    def submit(self, step: Step) -> Pending:
        """Start the step. Raises RequestError for what the device cannot hold, NoDeviceError after `close`."""
        self._check_open()
        if isinstance(step, Admit):
            write_admit(self._rings.next_entry(), step)
            self._num_logprobs[step.slot] = step.sampling.logprobs
            self._graphs.run("admit")
            return self._rings.sent(1, ())
        if isinstance(step, Prefill):
            write_prefill(self._rings.next_entry(), step, self.config.vocab_size)
            self._graphs.run(("prefill", _at_least(len(step.token_ids), self._buckets)))
            if step.is_last:
                self._graphs.run("first")
            return self._rings.sent(1, (self._num_logprobs[step.slot],))
        if isinstance(step, Decode):
            self._rings.write_decode(step.slots)
            self._graphs.run(("decode", _at_least(len(step.slots), self._row_counts)))
            return self._rings.sent(len(step.slots), tuple(self._num_logprobs[slot] for slot in step.slots))
        if isinstance(step, Release):
            return Nothing()
        raise ConfigError("the CUDA executor does not draft yet", expected="Decode steps", actual=type(step).__name__)

    def prompt_logits(self, slot: int, token_ids: tuple[int, ...]) -> Iterator[F32]:
        """Logits of every position, float32 [chunk, V] at a time."""
        group = len(self._arrays["logits"])
        for start in range(0, len(token_ids), self._limits.prefill_chunk):
            self._check_open()
            tokens = token_ids[start : start + self._limits.prefill_chunk]
            self._set_rows(slot, tokens, start)
            self._layers(_at_least(len(tokens), self._buckets), None)
            logits = np.empty((len(tokens), self.config.vocab_size), np.float32)
            for first in range(0, len(tokens), group):
                rows = self._arrays["x"][first : min(first + group, len(tokens))]
                out = self._arrays["logits"][: len(rows)]
                lm_head(self._ops, self.config, self._weights, out, rows)
                logits[first : first + len(rows)] = out.get(stream=self._stream)
            yield logits

    def close(self) -> None:
        """Free graphs, arena and host memory, also after a fault of the device."""
        if self._closed:
            return
        self._closed = True
        try:
            self._stream.synchronize()
        except cupy.cuda.runtime.CUDARuntimeError:
            return  # the context is lost, and all its memory with it
        self._graphs.close()
        self._gemm.close()
        self._rings.close()
        self._arrays, self._weights = {}, {}
        del self._arena, self._memory, self._ops, self._steps

    def _check_open(self) -> None:
        if self._closed:
            raise NoDeviceError("the executor is closed", fix="make a new LLM")

    def _make_ops(self, launcher: Launcher) -> CudaOps:
        config, device = self.config, self.device
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        capability = int(device.arch.removeprefix("sm_"))
        decode_plan = plan_decode_attention(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_context=self.plan.max_context,
            max_rows=MAX_ROWS,
            arch=capability,
            num_sms=device.num_sms,
        )
        limits = DeviceLimits(device.num_sms, device.shared_bytes_per_block, clusters=capability >= 90)
        prefill_plan = plan_prefill_attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
        return CudaOps(config, launcher, self._gemm, self._arrays, limits, decode_plan, prefill_plan)

    def _fill_tables(self, position_limit: int) -> None:
        layout = KVLayout.of(self.config, self.plan.max_context, self.plan.max_sequences)
        with self._stream:
            for name in ("step_context", "attention_arrivals", "slot_states", "token_counts", "chunk", "token_ids"):
                self._arrays[name].fill(0)
            self._arrays["positions"].fill(0)
            self._arrays["slots"].fill(-1)
            self._arrays["block_tables"].set(np.array(layout.block_tables(), np.int32))
            self._arrays["rope"].set(rope_table(self.config, self.plan.max_context, position_limit))
        self._stream.synchronize()

    def _capture(self) -> None:
        """Compile what every shape needs, run each once on padding rows, which loads it, then capture it."""
        with self._launcher.recording() as modules:
            self._every_shape()
            self._steps.admit()
            self._steps.sample(1)
        compile_all(self._modules.arch, self._modules.dtype, modules)
        self._every_shape()
        self._steps.load()
        self._stream.synchronize()
        self._graphs.add("admit", self._steps.admit)
        self._graphs.add("first", self._first_token)
        for bucket in self._buckets:
            self._graphs.add(("prefill", bucket), lambda rows=bucket: self._prefill(rows))  # type: ignore[misc]
        for count in self._row_counts:
            self._graphs.add(("decode", count), lambda rows=count: self._decode(rows))  # type: ignore[misc]
        self._stream.synchronize()

    def _every_shape(self) -> None:
        for bucket in self._buckets:
            self._layers(bucket, None)
        for count in self._row_counts:
            self._layers(count, slice(None))
        self._head_of_first_row()

    def _prefill(self, bucket: int) -> None:
        self._steps.prefill_begin(bucket)
        self._layers(bucket, None)
        self._steps.prefill_end()

    def _first_token(self) -> None:
        self._steps.first_begin()
        self._head_of_first_row()
        self._steps.sample(1)

    def _decode(self, num_rows: int) -> None:
        self._steps.step_begin(num_rows)
        self._layers(num_rows, slice(None))
        self._steps.sample(num_rows)

    def _head_of_first_row(self) -> None:
        lm_head(self._ops, self.config, self._weights, self._arrays["logits"][:1], self._arrays["x"][:1])

    def _layers(self, num_rows: int, logit_rows: slice | None) -> None:
        arrays = self._arrays
        tokens, positions, slots = (arrays[name][:num_rows] for name in ("token_ids", "positions", "slots"))
        rows = Rows(tokens, positions, slots, arrays["block_tables"], is_prefill=num_rows > MAX_ROWS)
        buffers = {name: arrays[name][:num_rows] for name in _ROW_BUFFERS}
        buffers |= {name: arrays[name] for name in ("k_pages", "v_pages", "rope")}
        if logit_rows is not None:
            buffers["logits"] = arrays["logits"][:num_rows]
        forward(self._ops, self.config, self._weights, buffers, rows, logit_rows)

    def _set_rows(self, slot: int, token_ids: tuple[int, ...], start: int) -> None:
        """Rows of a chunk outside of a step; what the bucket has beyond them is padding."""
        count, bucket = len(token_ids), _at_least(len(token_ids), self._buckets)
        with self._stream:
            for name, values, padding in (
                ("token_ids", np.array(token_ids), 0),
                ("positions", np.arange(start, start + count), 0),
                ("slots", np.full(count, slot), -1),
            ):
                padded = np.full(bucket, padding, np.int32)
                padded[:count] = values
                self._arrays[name][:bucket].set(padded)
            self._arrays["chunk"].set(np.array([slot, start, count, 0], np.int32))


def _at_least(count: int, sizes: tuple[int, ...]) -> int:
    return next(size for size in sizes if size >= count)

"""Launches of the step's own kernels: commands in, rows set up, tokens sampled, results out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from cpmrt.config import ModelConfig
from cpmrt.cuda.build.launcher import Launcher, Module
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray, KernelArgument
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.step.masks import MaskRing
from cpmrt.cuda.step.rings import Rings
from cpmrt.executor import MAX_ROWS


def _step(name: str, does: str, *, hot: bool = False) -> KernelSpec:
    return KernelSpec(name, "step/step.cu", constants=("VOCAB", "HIDDEN"), hot=hot, reason=f"bookkeeping: {does}")


ADMIT = _step("admit", "a new sequence in a slot")
RECALL = _step("recall", "prompt tokens that need no prefill")
STEP_BEGIN = _step("step_begin", "the rows of a decode step", hot=True)
CERTAIN_BEGIN = _step("certain_begin", "the rows of a decode step whose slots bring certain tokens", hot=True)
PREFILL_BEGIN = _step("prefill_begin", "the rows of a prefill chunk", hot=True)
PREFILL_END = _step("prefill_end", "a chunk without a token is done")
FIRST_BEGIN = _step("first_begin", "the row that the first token comes from")
SAMPLE = KernelSpec(
    "sample", "sampling/sampling.cu", constants=("VOCAB", "PORTABLE"), hot=True, reason="the sampling chain"
)
SAMPLE_MASKED = KernelSpec(
    "sample_masked", "sampling/masked_sampling.cu", constants=("VOCAB", "PORTABLE"), hot=True,
    reason="the sampling chain under masks that the host writes",
)  # fmt: skip
LOOP_END = KernelSpec("loop_end", "step/loop.cu", reason="bookkeeping: whether a launch goes on with its next steps")
ROW_THREADS = 512
"""Threads of a block of the kernels whose blocks share a row of logits (`row_blocks`)."""


def row_blocks(device: Device) -> int:
    """Return how many blocks share a row of logits, as `row_blocks.cuh` has it: a cluster, or one block alone."""
    return 8 if device.capability >= 90 else 1


def step_modules(config: ModelConfig, device: Device) -> tuple[Module, Module, Module]:
    """Return the modules of `StepKernels` other than loop.cu: step.cu, sampling.cu and masked_sampling.cu."""
    sampling = {"VOCAB": config.vocab_size, "PORTABLE": int(device.is_portable)}
    steps = {"VOCAB": config.vocab_size, "HIDDEN": config.hidden_size}
    return (ADMIT.file, steps), (SAMPLE.file, sampling), (SAMPLE_MASKED.file, sampling)


@dataclass(frozen=True)
class StepState:
    """The buffers that the kernels of a step read and write, named as in the memory plan."""

    block_tables: DeviceArray
    chunk: DeviceArray
    logits: DeviceArray
    positions: DeviceArray
    sampled_slots: DeviceArray
    """The slot of each row of `certain_begin` that is sampled, -1 for all other rows."""
    slot_states: DeviceArray
    slots: DeviceArray
    step_context: DeviceArray
    token_counts: DeviceArray
    token_ids: DeviceArray
    x: DeviceArray
    # None where nothing is drafted.
    capacities: DeviceArray | None = None
    carry_counts: DeviceArray | None = None
    history: DeviceArray | None = None

    @classmethod
    def of(cls, arrays: Mapping[str, DeviceArray]) -> StepState:
        """Find the buffers among all regions of the plan."""
        return cls(**{field.name: arrays[field.name] for field in fields(cls) if field.name in arrays})


class StepKernels:
    """`kernels_cu/step/step.cu`, `sampling.cu` and `loop.cu` on the arena's arrays."""

    def __init__(
        self, launcher: Launcher, config: ModelConfig, arrays: Mapping[str, DeviceArray], rings: Rings, device: Device
    ):
        self._launch, self._state = launcher, StepState.of(arrays)
        self._commands, self._results = rings.addresses
        self._command_bytes = np.int32(rings.command_bytes)
        (_, self._constants), (_, self._sampling), _ = step_modules(config, device)
        self._hidden = config.hidden_size
        history = self._state.history
        self._max_context = np.int32(0 if history is None else history.shape[1])
        self._row_blocks = row_blocks(device)

    def load(self, *, loops: bool) -> None:
        """Load every kernel without running one; `loop_end` only with `loops`."""
        if loops:
            self._launch.modules.kernel(LOOP_END, {})
        for spec in (ADMIT, RECALL, STEP_BEGIN, CERTAIN_BEGIN, PREFILL_BEGIN, PREFILL_END, FIRST_BEGIN):
            self._launch.modules.kernel(spec, self._constants)
        for spec in (SAMPLE, SAMPLE_MASKED):
            self._launch.modules.kernel(spec, self._sampling)

    def admit(self) -> None:
        s = self._state
        tables, limits = s.block_tables, (s.capacities, s.carry_counts)
        outputs = (s.slot_states, s.token_counts, tables, *limits, self._results, s.step_context)
        self._step(ADMIT, 1, 1024, *outputs, *self._in(), np.int32(tables.shape[1]))

    def recall(self) -> None:
        s = self._state
        outputs = (s.slot_states, s.token_counts, s.history, self._results, s.step_context)
        self._step(RECALL, 1, 1024, *outputs, *self._in(), self._max_context)

    def step_begin(self, num_rows: int) -> None:
        s = self._state
        outputs = (s.token_ids, s.positions, s.slots, s.slot_states, s.history, self._results)
        sizes = (self._max_context, np.int32(num_rows))
        self._step(STEP_BEGIN, 1, 64, *outputs, s.step_context, *self._in(), *sizes)

    def certain_begin(self, num_rows: int) -> None:
        """Set up the rows of a decode step as `step_begin` does, and rows of its slots' certain tokens."""
        s = self._state
        rows = (s.token_ids, s.positions, s.slots, s.sampled_slots, s.slot_states, s.token_counts)
        sizes = (self._max_context, np.int32(num_rows))
        self._step(
            CERTAIN_BEGIN, 1, MAX_ROWS, *rows, s.history, self._results, s.step_context, *self._in(), *sizes
        )

    def prefill_begin(self, bucket: int) -> None:
        s = self._state
        rows = (s.token_ids, s.positions, s.slots, s.chunk, s.slot_states, s.token_counts)
        sizes = (self._max_context, np.int32(bucket))
        self._step(PREFILL_BEGIN, 1, 1024, *rows, s.history, s.step_context, *self._in(), *sizes)

    def prefill_end(self) -> None:
        self._step(PREFILL_END, 1, 32, self._results, self._state.chunk, self._state.step_context)

    def first_begin(self) -> None:
        self._step(FIRST_BEGIN, -(-self._hidden // 8 // 128), 128, self._state.x, self._state.chunk)

    def sample(self, num_rows: int) -> None:
        s = self._state
        self._launch(
            SAMPLE, self._sampling, (self._row_blocks, num_rows), ROW_THREADS,
            self._results, s.slot_states, s.token_counts, s.logits, s.slots, s.step_context,
        )  # fmt: skip

    def sample_masked(self, num_rows: int, masks: MaskRing, *, is_certain: bool = False) -> None:
        """Sample as `sample` does, each row under its mask in `masks`, which the kernel waits for.

        `is_certain`: the rows are those of `certain_begin`, of which some are not sampled.
        """
        s = self._state
        slots = s.sampled_slots if is_certain else s.slots
        self._launch(
            SAMPLE_MASKED, self._sampling, (self._row_blocks, num_rows), ROW_THREADS,
            self._results, s.slot_states, s.token_counts, s.logits, slots, s.step_context,
            *masks.addresses, np.int32(masks.num_rows), np.int32(masks.num_words),
        )  # fmt: skip

    def loop_end(self, num_rows: int, num_words: int, handle: np.uint64, num_passes: int, num_steps: int) -> None:
        """End a pass of `num_steps` steps, the body of the WHILE node with this handle, and decide whether it goes on.

        The node makes at most `num_passes` passes, and none more once all sequences have finished. `num_rows`: the rows
        of a step that may have sequences. `num_words`: the words that answer the command of a step.
        """
        s, sizes = self._state, map(np.int32, (num_passes, num_steps, num_rows, num_words))
        outputs = (self._results, s.step_context)
        self._launch(LOOP_END, {}, 1, MAX_ROWS, *outputs, s.slot_states, s.slots, handle, *sizes)

    def _step(self, spec: KernelSpec, grid: int, block: int, *args: KernelArgument) -> None:
        self._launch(spec, self._constants, grid, block, *args)

    def _in(self) -> tuple[np.uint64, np.int32]:
        return self._commands, self._command_bytes

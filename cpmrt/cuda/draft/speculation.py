"""Speculation on the GPU: the draft beside the target in every step, and whole speculative steps as graphs.

The draft must see every token. What it has not seen yet waits in the carry of its slot: up to `MAX_PENDING` of the
target's hidden states. This file knows at most how many wait, without asking the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from cpmrt.config import ModelConfig, TreeShape
from cpmrt.cuda.build.launcher import Launcher, Module
from cpmrt.cuda.draft.forward import SCRATCH, DraftForward, every_shape, waiting_rows
from cpmrt.cuda.draft.kernels import TreeKernels, tree_modules
from cpmrt.cuda.draft.memory import tree_tables
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.driver.graphs import Graphs
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.step.costs import launch_seconds
from cpmrt.cuda.step.forward import StepForward
from cpmrt.cuda.step.rings import Answer, Rings
from cpmrt.cuda.step.structs import CATCH_UP, SPECULATE
from cpmrt.executor import Speculate
from cpmrt.memory.plan import MemoryPlan
from cpmrt.models.draft import MAX_PENDING, Draft
from cpmrt.models.draft import tables as draft_tables


class Speculation:
    """The draft of a CUDA executor: its launches, its graphs, and how much it has not seen of each slot."""

    def __init__(
        self,
        draft: Draft,
        config: ModelConfig,
        device: Device,
        launcher: Launcher,
        gemm: Gemm,
        arrays: Mapping[str, Any],
        rings: Rings,
        target: StepForward,
        plan: MemoryPlan,
    ):
        self._draft, self._arrays, self._rings, self._target = draft, arrays, rings, target
        self._launcher = launcher
        self._max_context = plan.max_context
        self._config, self._device = config, device
        self._kernels = TreeKernels(
            launcher, config, arrays, plan.caches, rings, device,
            draft_vocab=draft.vocab_size, position_offset=int(draft.config.is_eagle),
        )  # fmt: skip
        self._forward = None
        if plan.draft_caches is not None:
            self._forward = DraftForward(draft, device, launcher, gemm, arrays, plan.draft_caches)
        self._waiting_rows = waiting_rows(draft)
        self._max_emitted = tuple(shape.max_emitted for shape in draft.shapes)
        self._pending: dict[int, int] = {}

    def modules(self) -> tuple[Module, ...]:
        """What is launched beside the forwards."""
        return tree_modules(self._config, self._device, self._draft.vocab_size)

    def every_shape(self, buckets: tuple[int, ...]) -> None:
        """Each forward once, on padding rows."""
        every_shape(self._draft, self._target, self._forward, buckets)

    def load(self) -> None:
        """Load the kernels that are not run by `every_shape`."""
        self._kernels.load()

    def add_graphs(self, graphs: Graphs, buckets: tuple[int, ...], loop_end: Callable[..., None]) -> None:
        """Capture what the draft does of its own accord, and the speculative step of each shape.

        `loop_end` is that of `StepKernels`. The first row of the target is the tree's root.
        """
        for number, shape in enumerate(self._draft.shapes):
            end = partial(loop_end, 1, shape.max_emitted)
            graphs.add_step(("speculate", number), partial(self._speculate, shape), end)
        if self._forward is None:
            return
        for bucket in buckets:
            graphs.add(("draft", bucket), partial(self._chunk, bucket))
        graphs.add("catch_up", self._catch_up)

    def fill_tables(self, capacity: int, position_limit: int) -> None:
        """Before the first step; `capacity`: positions that every slot's own pages hold. The stream is current."""
        a, draft = self._arrays, self._draft
        for spec in tree_tables(1, 1, 1, 1):
            if spec.name in a:
                a[spec.name].fill(0)
        a["draft_slots"].fill(-1)
        a["capacities"].fill(capacity)
        if self._forward is None:
            return
        # A window may leave out some keys of a page only, with weight 0: they must be numbers.
        for name in ("draft.k_pages", "draft.v_pages", f"{SCRATCH}attention_arrivals"):
            a[name].fill(0)
        if f"{SCRATCH}packed_arrivals" in a:
            a[f"{SCRATCH}packed_arrivals"].fill(0)
        for table in draft_tables(draft, self._max_context, position_limit):
            a[table.spec.name].set(table.values())

    def admitted(self, slot: int) -> None:
        """Nothing of the slot's new sequence is there yet."""
        self._pending[slot] = 0

    def prefilled(self, graphs: Graphs, slot: int, bucket: int) -> None:
        """After the target's graphs of a chunk: the draft's."""
        if self._forward is not None:
            graphs.run(("draft", bucket))
            self._pending[slot] = 1

    def after_decode(self, num_rows: int) -> None:
        """Launches at the end of a decode step: its hidden states are the draft's to see."""
        if self._forward is not None:
            self._kernels.carry_rows(num_rows, self._hidden(num_rows))

    def make_room(self, graphs: Graphs, slots: tuple[int, ...]) -> None:
        """Before a decode step: no carry may overflow."""
        if self._forward is None:
            return
        for slot in slots:
            if self._pending[slot] >= MAX_PENDING:
                self._run_catch_up(graphs, slot)
            self._pending[slot] += 1

    def speculate(self, graphs: Graphs, step: Speculate, num_logprobs: tuple[int, ...]) -> Answer:
        """Start a step. `num_logprobs`: what its sequence asked for."""
        slot = step.slots[0]
        if self._forward is not None and self._pending[slot] > self._waiting_rows:
            self._run_catch_up(graphs, slot)
        self._rings.write_slots(SPECULATE, step.slots)
        start = graphs.run_step(("speculate", step.shape), step.slots)
        self._pending[slot] = emitted = self._max_emitted[step.shape]
        return self._rings.sent(emitted, num_logprobs, start)

    def pass_seconds(self, shape: int) -> tuple[float, float]:
        """Of the draft's passes and of the target's in a step of this shape, over the rows that the last step left."""
        tree, draft, stream = self._draft.shapes[shape], self._forward, self._launcher.stream

        def passes() -> None:
            if draft is not None:
                draft.waiting(self._waiting_rows)
                for _ in range(tree.num_passes - 1):
                    draft.frontier(tree.top_k)

        drafting = 0.0 if draft is None else launch_seconds(stream, passes)
        return drafting, launch_seconds(stream, lambda: self._target.tree(tree.tree_size))

    def _run_catch_up(self, graphs: Graphs, slot: int) -> None:
        self._rings.write_slots(CATCH_UP, (slot,))
        graphs.run("catch_up")
        self._rings.sent(1, ())
        self._pending[slot] = 1

    def _chunk(self, bucket: int) -> None:
        assert self._forward is not None
        self._kernels.prefill_rows(bucket, self._states_after_carry(bucket))
        self._forward.chunk(bucket)

    def _catch_up(self) -> None:
        assert self._forward is not None
        self._kernels.catch_up_begin(self._hidden(MAX_PENDING))
        self._forward.waiting(MAX_PENDING)
        self._kernels.catch_up_end()

    def _speculate(self, shape: TreeShape) -> None:
        kernels = self._kernels
        if self._forward is None:
            kernels.speculate_begin(0)
            kernels.lookup(shape)
        else:
            self._grow(shape, self._forward)
            kernels.tree_finish(shape)
        self._target.tree(shape.tree_size)
        kernels.sample_tree(self._arrays["logits"][: shape.tree_size])
        kernels.accept(shape, self._hidden(shape.tree_size), self._draft.forced_accept)
        self._target.path_accepted()

    def _grow(self, shape: TreeShape, draft: DraftForward) -> None:
        """The draft's passes, and the candidates of each."""
        kernels, rows, k = self._kernels, self._waiting_rows, shape.top_k
        token_map = self._arrays.get("draft.token_map")
        kernels.speculate_begin(rows, self._hidden(rows))
        draft.waiting(rows)
        kernels.top_k(draft.logits(1), k, token_map, first_row=rows - 1)
        outputs = draft.outputs(rows - 1, rows)
        for depth in range(1, shape.num_passes):
            kernels.tree_grow(shape, depth, outputs, draft.parents(k))
            draft.frontier(k)
            kernels.top_k(draft.logits(k), k, token_map)
            outputs = draft.outputs(0, k)

    def _hidden(self, num_rows: int) -> Any | None:
        """The target's states that the draft reads."""
        return self._arrays["hidden"][:num_rows] if self._draft.config.hidden_width else None

    def _states_after_carry(self, bucket: int) -> Any | None:
        """Those of a chunk, behind the row that the chunk before left; so the draft's row i finds its own in row i."""
        return self._arrays["hidden"][: bucket + 1] if self._draft.config.hidden_width else None

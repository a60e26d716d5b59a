"""Speculation on the GPU: the draft beside the target in every step, and whole speculative steps as graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

from cpmrt.config import ModelConfig, TreeShape
from cpmrt.cuda.build.launcher import Launcher, Module
from cpmrt.cuda.draft.block import BlockKernels, block_modules, candidate_vocab
from cpmrt.cuda.draft.forward import SCRATCH, DraftForward, every_shape, waiting_rows
from cpmrt.cuda.draft.kernels import TreeKernels
from cpmrt.cuda.draft.memory import tree_tables
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.driver.graphs import Graphs
from cpmrt.cuda.load.tables import fill_tables
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.step.costs import launch_seconds
from cpmrt.cuda.step.forward import StepForward
from cpmrt.cuda.step.masks import MaskedTree, TreeRing
from cpmrt.cuda.step.rings import Answer, Rings
from cpmrt.cuda.step.structs import CATCH_UP, SPECULATE
from cpmrt.executor import Speculate, TreeMasks
from cpmrt.memory.plan import MemoryPlan
from cpmrt.models.draft import Draft
from cpmrt.models.draft import tables as draft_tables
from cpmrt.speculation.procedure import MAX_WAITING, Waiting, after_chunk, catch_up, speculate, speculate_block


class DraftLaunches:
    """The operations of the drafting procedure as launches (`speculation.procedure.BlockOps`).

    Which slot they are about the kernels read from the command of the step. `blocks`: of a draft that drafts blocks.
    With `ring` nodes have masks: the host is told the tree, and looks at it while the target runs.
    """

    def __init__(
        self,
        draft: Draft,
        kernels: TreeKernels,
        forward: DraftForward | None,
        target: StepForward,
        arrays: Mapping[str, Any],
        blocks: BlockKernels | None = None,
        ring: TreeRing | None = None,
    ):
        self._blocks, self._ring = blocks, ring
        self._draft, self._kernels, self._forward, self._target = draft, kernels, forward, target
        self._logits: DeviceArray = arrays["logits"]
        self._token_map: DeviceArray | None = arrays.get("draft.token_map")
        self._hidden_states: DeviceArray | None = arrays["hidden"] if draft.config.hidden_width else None

    @property
    def _model(self) -> DraftForward:
        assert self._forward is not None
        return self._forward

    def begin(self, num_rows: int) -> None:
        self._kernels.speculate_begin(num_rows, self._hidden(num_rows))

    def waiting(self, num_rows: int) -> None:
        self._model.waiting(num_rows)

    def top_k(self, shape: TreeShape, rows: slice) -> None:
        logits = self._model.logits(rows.stop - rows.start)
        self._kernels.top_k(logits, shape.top_k, self._token_map, first_row=rows.start)

    def grow(self, shape: TreeShape, depth: int, rows: slice) -> None:
        self._kernels.tree_grow(shape, depth, self._model.outputs(rows), self._model.parents(shape.top_k))

    def frontier(self, num_rows: int) -> None:
        self._model.frontier(num_rows)

    def finish(self, shape: TreeShape) -> None:
        self._kernels.tree_finish(shape)

    def block(self, num_rows: int) -> None:
        self._block_kernels.block_begin()
        self._model.block(num_rows)

    def chain(self, shape: TreeShape) -> None:
        logits = self._model.logits(self._draft.block_rows)
        self._block_kernels.markov_chain(shape, logits, self._model.block_states())

    @property
    def _block_kernels(self) -> BlockKernels:
        assert self._blocks is not None
        return self._blocks

    def lookup(self, shape: TreeShape) -> None:
        self._kernels.lookup(shape)

    def lookup_instead(self, shape: TreeShape) -> None:
        self._kernels.lookup_instead(shape)

    def verify(self, shape: TreeShape) -> None:
        if self._ring is not None:
            self._kernels.report_tree(shape, self._ring)
        self._target.tree(shape.num_nodes)

    def sample(self, shape: TreeShape) -> None:
        if self._ring is not None:
            self._kernels.sample_masked_tree(self._logits[: shape.tree_size], self._ring)
        else:
            self._kernels.sample_tree(self._logits[: shape.num_nodes])

    def accept(self, shape: TreeShape) -> None:
        self._kernels.accept(shape, self._hidden(shape.num_nodes), self._draft.forced_accept)
        self._target.path_accepted()

    def catch_up_begin(self) -> None:
        self._kernels.catch_up_begin(self._hidden(MAX_WAITING))

    def catch_up_end(self) -> None:
        self._kernels.catch_up_end()

    def chunk_begin(self, num_rows: int) -> None:
        # The chunk's states stand behind the row that the chunk before has left.
        self._kernels.prefill_rows(num_rows, self._hidden(num_rows + 1))

    def chunk(self, num_rows: int) -> None:
        self._model.chunk(num_rows)

    def carry(self, num_rows: int) -> None:
        self._kernels.carry_rows(num_rows, self._hidden(num_rows))

    def _hidden(self, num_rows: int) -> DeviceArray | None:
        """The target's states that the draft reads; None where it reads none."""
        return self._hidden_states[:num_rows] if self._hidden_states is not None else None


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
        self._launcher, self._max_context = launcher, plan.max_context
        self._kernels = TreeKernels(
            launcher, config, arrays, plan.caches, rings, device,
            draft_vocab=candidate_vocab(draft), position_offset=int(draft.config.reads_states),
        )  # fmt: skip
        self._forward = None
        if plan.draft_caches is not None:
            self._forward = DraftForward(draft, device, launcher, gemm, arrays, plan.draft_caches)
        self._blocks = None
        if self._forward is not None and draft.block_rows:
            markov = self._forward.markov_weights()
            self._blocks = BlockKernels(launcher, draft, arrays, markov, device)
        operands = draft, self._kernels, self._forward, target, arrays, self._blocks
        self._ops = DraftLaunches(*operands)
        self._masked_ops = partial(DraftLaunches, *operands)
        self._waiting = Waiting(waiting_rows(draft))
        self._max_emitted = tuple(shape.max_emitted for shape in draft.shapes)
        self._vocab_size = config.vocab_size
        self._masked: tuple[TreeRing, DraftLaunches] | None = None
        """What runs steps with masks, made for the first one."""
        self._captured = set[Hashable]()

    def modules(self) -> tuple[Module, ...]:
        """Return the kernels that are launched beside the forwards."""
        return (*self._kernels.modules(), *block_modules(self._draft))

    def every_shape(self, buckets: tuple[int, ...]) -> None:
        """Run each forward once, on padding rows."""
        every_shape(self._draft, self._target, self._forward, buckets)

    def load(self) -> None:
        """Load the kernels that are not run by `every_shape`."""
        self._kernels.load()
        if self._blocks is not None:
            self._blocks.load()

    def launches(self, buckets: tuple[int, ...]) -> dict[Hashable, Callable[[], None]]:
        """Return by name of its graph what the draft does of its own accord: the speculative step of each shape, the
        draft's pass over a chunk of each bucket, catching up."""
        found: dict[Hashable, Callable[[], None]] = {
            ("speculate", number): self._step(self._ops, shape) for number, shape in enumerate(self._draft.shapes)
        }
        if self._forward is not None:
            found |= {("draft", bucket): partial(after_chunk, self._ops, bucket) for bucket in buckets}
            found["catch_up"] = partial(catch_up, self._ops)
        return found

    def _step(self, ops: DraftLaunches, shape: TreeShape) -> Callable[[], None]:
        """Return what launches a speculative step of this shape."""
        rows, block_rows = 0 if self._forward is None else self._waiting.step_rows, self._draft.block_rows
        if block_rows:
            return partial(speculate_block, ops, shape, rows, block_rows)
        return partial(speculate, ops, shape, rows)

    def add_graphs(self, graphs: Graphs, buckets: tuple[int, ...], loop_end: Callable[..., None]) -> None:
        """Capture the `launches`; `loop_end` is that of `StepKernels`. The first row of the target is the root."""
        launches = self.launches(buckets)
        for number, shape in enumerate(self._draft.shapes):
            name = "speculate", number
            graphs.add_step(name, launches.pop(name), partial(loop_end, 1, shape.max_emitted))
        for other, launch in launches.items():
            graphs.add(other, launch)

    def fill_tables(self, capacity: int, position_limit: int) -> None:
        """Fill the buffers, on the current stream. `capacity`: positions that a slot's own pages hold."""
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
        fill_tables(draft_tables(draft, self._max_context, position_limit), a, self._launcher.modules.dtype)

    def admitted(self, slot: int) -> None:
        """Nothing of the slot's new sequence is there yet."""
        self._waiting.admitted(slot)

    def prefilled(self, graphs: Graphs, slot: int, bucket: int) -> None:
        """Start the draft's pass over a chunk, after the target's graphs of it."""
        if self._forward is not None:
            graphs.run(("draft", bucket))
            self._waiting.prefilled(slot)

    def before_chunk(self, graphs: Graphs, slot: int) -> None:
        """Let the draft catch up with an answer before a chunk of it, which begins with its newest token."""
        if self._forward is not None and self._waiting.before_chunk(slot):
            self._run_catch_up(graphs, slot)

    def after_decode(self, num_rows: int) -> None:
        """Launch the end of a decode step, whose hidden states are the draft's to see."""
        if self._forward is not None:
            self._ops.carry(num_rows)

    def make_room(self, graphs: Graphs, slots: tuple[int, ...]) -> None:
        """Let drafts catch up before a decode step, so that no more tokens wait than there is room for."""
        if self._forward is not None:
            for slot in self._waiting.before_decode(slots):
                self._run_catch_up(graphs, slot)

    def speculate(self, graphs: Graphs, step: Speculate, num_logprobs: tuple[int, ...]) -> Answer:
        """Start a step. `num_logprobs`: what its sequence asked for."""
        (slot,) = step.slots
        if self._forward is not None and self._waiting.before_speculation(slot):
            self._run_catch_up(graphs, slot)
        self._rings.write_slots(SPECULATE, step.slots)
        help_along: Callable[[], bool | None] | None
        if step.masks is None:
            help_along = graphs.run_step(("speculate", step.shape), step.slots)
        else:
            help_along = self._start_masked(graphs, step.shape, step.masks)
        emitted = self._max_emitted[step.shape]
        self._waiting.accepted(slot, emitted)
        return self._rings.sent(emitted, num_logprobs, help_along)

    def close(self) -> None:
        """Free the host's memory; the device must be done with it."""
        if self._masked is not None:
            self._masked[0].close()

    def _start_masked(self, graphs: Graphs, shape: int, masks: TreeMasks) -> MaskedTree:
        """Start a step under masks, whose graph is captured when it is first needed."""
        if self._masked is None:
            ring = TreeRing(self._vocab_size)
            self._masked = ring, self._masked_ops(ring=ring)
        ring, ops = self._masked
        key = "speculate under masks", shape
        if key not in self._captured:
            graphs.add(key, self._step(ops, self._draft.shapes[shape]))
            self._captured.add(key)
        tree = MaskedTree(ring, self._rings.next_number, self._draft.shapes[shape].tree_size, masks)
        graphs.run(key)
        return tree

    def pass_seconds(self, shape: int) -> tuple[float, float]:
        """Time the draft's passes and the target's of a step of this shape, over the rows that the last step left."""
        tree, draft, stream = self._draft.shapes[shape], self._forward, self._launcher.stream

        def passes() -> None:
            if draft is not None:
                draft.waiting(self._waiting.step_rows)
                if self._draft.block_rows:
                    draft.block(self._draft.block_rows)
                    return
                for _ in range(tree.num_passes - 1):
                    draft.frontier(tree.top_k)

        drafting = 0.0 if draft is None else launch_seconds(stream, passes)
        return drafting, launch_seconds(stream, lambda: self._target.tree(tree.num_nodes))

    def _run_catch_up(self, graphs: Graphs, slot: int) -> None:
        self._rings.write_slots(CATCH_UP, (slot,))
        graphs.run("catch_up")
        self._rings.sent(1, ())

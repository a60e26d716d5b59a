"""Speculation on the GPU: the draft beside the target in every step, and whole speculative steps as graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

from cpmrt.config import ModelConfig
from cpmrt.cuda.build.launcher import Launcher, Module
from cpmrt.cuda.draft.forward import every_inner_shape, every_shape
from cpmrt.cuda.draft.inner import InnerSteps, Loop
from cpmrt.cuda.draft.launches import DraftLaunches, DraftParts
from cpmrt.cuda.draft.several import captured_count, captured_counts, late_rows, most_sequences, waiting_rows
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.driver.graphs import Graphs
from cpmrt.cuda.load.tables import fill, fill_tables
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.step.costs import launch_seconds
from cpmrt.cuda.step.forward import StepForward
from cpmrt.cuda.step.launches import run_on_padding
from cpmrt.cuda.step.masks import MaskedTree, TreeRing
from cpmrt.cuda.step.rings import Answer, Rings
from cpmrt.cuda.step.structs import CATCH_UP, SPECULATE
from cpmrt.executor import Decode, Speculate, TreeMasks
from cpmrt.memory.plan import MemoryPlan
from cpmrt.models.draft import Draft
from cpmrt.models.draft import tables as draft_tables
from cpmrt.ops import RowKind
from cpmrt.speculation.procedure import MAX_WAITING, Waiting, after_chunk, catch_up


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
        loop: Loop,
    ):
        self._draft, self._arrays, self._rings, self._target = draft, arrays, rings, target
        self._launcher, self._max_context = launcher, plan.max_context
        machine = device, launcher, gemm
        self._parts = DraftParts.bind(draft, config, *machine, arrays, rings, plan.caches, plan.draft_caches)
        self._forward, self._inner = self._parts.forward, None
        if draft.inner is not None and self._forward is not None:
            self._inner = InnerSteps.bind(draft, self._forward, *machine, arrays, rings, plan, loop)
        operands = self._parts, target, arrays, self._inner
        self._ops = DraftLaunches(*operands)
        self._several_ops = partial(DraftLaunches, *operands)
        self._waiting = Waiting()
        self.most = most_sequences(draft, plan.caches)
        """The most sequences of a step, for each shape."""
        self._max_emitted = tuple(shape.max_emitted for shape in draft.shapes)
        self._vocab_size = config.vocab_size
        self._masked_ring: TreeRing | None = None
        """The trees and masks of steps with masks, made when the first such step starts."""
        self._captured = set[tuple[int, int]]()
        """The captured steps with masks: the number of the shape and the rows of the draft's first pass."""

    def modules(self) -> tuple[Module, ...]:
        """Return the modules of the kernels that are launched beside the forwards."""
        return (*self._parts.modules(), *(self._inner.modules() if self._inner else ()))

    def every_shape(self, buckets: tuple[int, ...]) -> None:
        """Run each forward once, on padding rows."""
        every_shape(self._draft, self._target.of_each_kind(), self._forward, buckets, self.most)
        if self._inner is not None and self._forward is not None:
            every_inner_shape(self._draft, self._forward, self._inner.parts.forward, buckets)

    def load(self) -> None:
        """Load the kernels that are not run by `every_shape`."""
        self._parts.load()
        if self._inner is not None:
            self._inner.load()

    def launches(self, buckets: tuple[int, ...]) -> dict[Hashable, Callable[[], None]]:
        """Return the launches of each graph of the draft by its name: the speculative step of each shape for each
        number of sequences and kind of nodes, also with the target's head screened where it can be, the draft's pass
        over a chunk of each bucket, and catching up."""
        found: dict[Hashable, Callable[[], None]] = {}
        for number, count, kind, is_screened in self._steps():
            ops = self._several_ops(num_trees=count, kind=kind, is_screened=is_screened)
            found["speculate", number, count, kind, is_screened] = self._parts.step(ops, self._draft.shapes[number])
        if self._forward is not None:
            found |= {("draft", bucket): partial(after_chunk, self._ops, bucket) for bucket in buckets}
            found["catch_up"] = partial(catch_up, self._ops, MAX_WAITING)
        return found

    def add_graphs(self, graphs: Graphs, buckets: tuple[int, ...], loop_end: Callable[..., None]) -> None:
        """Capture the `launches`. `loop_end` is that of `StepKernels`; of a single tree it looks at row 0, the root.

        A step with an inner draft, which has a loop of its own, is always a launch of its own.
        """
        launches = self.launches(buckets)
        if self._inner is None:
            for number, count, kind, is_screened in self._steps():
                shape, name = self._draft.shapes[number], ("speculate", number, count, kind, is_screened)
                num_rows, num_words = 1 if count == 1 else count * shape.num_nodes, count * shape.max_emitted
                graphs.add_step(name, launches.pop(name), partial(loop_end, num_rows, num_words))
        for other, launch in launches.items():
            graphs.add(other, launch)

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of sequences, from 2 on, for which any shape's step is captured."""
        return tuple(sorted({count for most in self.most for count in captured_counts(most)} - {1}))

    def _steps(self) -> Iterator[tuple[int, int, RowKind, bool]]:
        """Yield the steps that are captured: number of the shape, number of sequences, kind of the nodes, and whether
        the target's head is screened."""
        target = self._target
        for number, (shape, most) in enumerate(zip(self._draft.shapes, self.most, strict=True)):
            for count in captured_counts(most):
                yield from product((number,), (count,), target.tree_kinds, target.screenings(count * shape.num_nodes))

    def fill_tables(self, capacity: int, position_limit: int) -> None:
        """Fill the buffers, on the current stream. `capacity`: positions that a slot's own pages hold."""
        a = self._arrays
        _mark_empty(a)
        if self._inner is not None:
            self._inner.mark_empty(_mark_empty)
        fill(a["capacities"], capacity)
        tables = draft_tables(self._draft, self._max_context, position_limit)
        fill_tables(tables, a, self._launcher.modules.dtype)

    def admitted(self, slot: int) -> None:
        """Note that the draft has seen nothing of the slot's new sequence, of which no token waits yet."""
        self._waiting.admitted(slot)
        if self._inner is not None:
            with self._launcher.stream:
                self._inner.admitted(slot)

    def prefilled(self, graphs: Graphs, slot: int, bucket: int) -> None:
        """Start the draft's pass over a chunk, after the target's graphs of it."""
        if self._forward is not None:
            graphs.run(("draft", bucket))
            self._waiting.prefilled(slot)

    def after_decode(self, num_rows: int) -> None:
        """Launch the end of a decode step, which keeps the step's hidden states for the draft."""
        if self._forward is not None:
            self._ops.carry(num_rows)

    def make_room(self, graphs: Graphs, step: Decode) -> None:
        """Let drafts catch up before a decode step, so that no more tokens wait than there is room for."""
        if self._forward is not None:
            counts = dict.fromkeys(step.slots, 1)
            counts |= {slot: 1 + len(tokens) for slot, tokens in zip(step.slots, step.certain, strict=False)}
            for slot in self._waiting.before_decode(counts):
                self._run_catch_up(graphs, slot)

    def speculate(
        self, graphs: Graphs, step: Speculate, num_logprobs: tuple[int, ...], kind: RowKind, *, may_screen: bool
    ) -> Answer:
        """Start a step. `num_logprobs`: how many log-probabilities each of its sequences asked for. `kind`: that of its
        nodes, one of the target's `tree_kinds`. `may_screen`: whether `can_screen` is true for all of its sequences."""
        first_rows = self._first_rows(step)
        for slot in step.slots:
            if self._forward is not None and self._waiting.before_speculation(slot, first_rows):
                self._run_catch_up(graphs, slot)
        self._rings.write_slots(SPECULATE, step.slots)
        help_along: Callable[[], bool | None] | None = None
        count = captured_count(len(step.slots), self.most[step.shape])
        num_rows = count * self._draft.shapes[step.shape].num_nodes
        is_screened = may_screen and step.masks is None and self._target.has_screen(num_rows)
        name = "speculate", step.shape, count, kind, is_screened
        if step.masks is not None:
            help_along = self._start_masked(graphs, step.shape, first_rows, kind, step.masks)
        elif self._inner is not None:
            graphs.run(name)
        else:
            help_along = graphs.run_step(name, step.slots)
        emitted = self._max_emitted[step.shape]
        for slot in step.slots:
            self._waiting.accepted(slot, emitted)
        return self._rings.sent(emitted * len(step.slots), num_logprobs, help_along, is_screened=is_screened)

    def close(self) -> None:
        """Free the host's memory; the device must be done with it."""
        if self._masked_ring is not None:
            self._masked_ring.close()

    def _first_rows(self, step: Speculate) -> int:
        """Return how many rows each slot has in the pass over waiting tokens that a step begins with."""
        few = waiting_rows(self._draft)
        if step.masks is None or self._forward is None or self._waiting.of(step.slots[0]) <= few:
            return few
        return late_rows(self._draft)

    def _start_masked(
        self, graphs: Graphs, shape: int, num_rows: int, kind: RowKind, masks: TreeMasks
    ) -> MaskedTree:
        """Start a step under masks. The first one captures the graphs of all shapes and kinds: later ones may be
        submitted while a tree waits for its masks, and a capture might wait for the device. The graphs for more waiting
        tokens than usual are captured when first needed, because nothing is in flight then."""
        ring = self._masked_ring = self._masked_ring or TreeRing(self._vocab_size)
        few = waiting_rows(self._draft)
        for number in range(len(self._draft.shapes)):
            if (number, few) not in self._captured:  # mostly all are, unless a capture failed
                self._capture_masked(graphs, number, few)
        if (shape, num_rows) not in self._captured:
            assert self._forward is not None
            waiting = partial(self._forward.waiting, num_rows)
            run_on_padding(self._launcher, graphs, self._arrays["draft_slots"], waiting)
            self._capture_masked(graphs, shape, num_rows)
        tree = MaskedTree(ring, self._rings.next_number, self._draft.shapes[shape].num_nodes, masks)
        graphs.run(("speculate under masks", shape, num_rows, kind))
        return tree

    def _capture_masked(self, graphs: Graphs, shape: int, num_rows: int) -> None:
        for kind in self._target.tree_kinds:
            ops = self._several_ops(ring=self._masked_ring, kind=kind)
            step = self._parts.step(ops, self._draft.shapes[shape], num_rows)
            graphs.add(("speculate under masks", shape, num_rows, kind), step)
        self._captured.add((shape, num_rows))

    def pass_seconds(self, shape: int) -> tuple[float, float]:
        """Time the draft's passes and the target's of a step of this shape, over the rows that the last step left.

        The last step was greedy, so the head is screened where it can be; its count of exact tokens is not read.
        """
        tree, stream = self._draft.shapes[shape], self._launcher.stream
        is_screened = self._target.has_screen(tree.num_nodes)

        def passes() -> None:
            self._parts.passes(tree)
            if self._inner is not None:
                self._inner.passes(tree.tree_depth)

        drafting = 0.0 if self._forward is None else launch_seconds(stream, passes)
        return drafting, launch_seconds(stream, partial(self._target.tree, tree.num_nodes, is_screened=is_screened))

    def _run_catch_up(self, graphs: Graphs, slot: int) -> None:
        self._rings.write_slots(CATCH_UP, (slot,))
        graphs.run("catch_up")
        self._rings.sent(1, ())


def _mark_empty(arrays: Mapping[str, Any]) -> None:
    """Mark a draft's rows as padding and clear its pages, on the current stream."""
    fill(arrays["draft_slots"], -1)
    # A window may leave out keys of a page by giving them weight 0, so even unwritten keys and values must be finite.
    for name in ("draft.k_pages", "draft.v_pages"):
        if name in arrays:
            arrays[name].fill(0)

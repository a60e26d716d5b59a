"""A draft's kernels and passes on the arrays of its target, and the operations of drafting as launches of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from cpmrt.config import ModelConfig, TreeShape
from cpmrt.cuda.build.launcher import Launcher, Module
from cpmrt.cuda.draft.block import BlockKernels, block_modules, candidate_vocab
from cpmrt.cuda.draft.forward import DraftForward, TreeForward, draft_forward
from cpmrt.cuda.draft.kernels import TreeKernels
from cpmrt.cuda.draft.several import waiting_rows
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.step.masks import TreeRing
from cpmrt.cuda.step.rings import Rings
from cpmrt.memory.caches import CacheLayout
from cpmrt.models.draft import Draft
from cpmrt.ops import ANY_ROWS, RowKind
from cpmrt.speculation.procedure import speculate, speculate_block, speculate_chain

if TYPE_CHECKING:
    from cpmrt.cuda.draft.inner import InnerSteps


@dataclass(frozen=True)
class DraftParts:
    """The kernels and passes of a draft. `forward` is None for prompt lookup, `blocks` for all but DSpark drafts."""

    draft: Draft
    kernels: TreeKernels
    forward: DraftForward | None
    blocks: BlockKernels | None

    @classmethod
    def bind(
        cls,
        draft: Draft,
        config: ModelConfig,
        device: Device,
        launcher: Launcher,
        gemm: Gemm,
        arrays: Mapping[str, Any],
        rings: Rings,
        caches: CacheLayout,
        own_caches: CacheLayout | None,
        *,
        reports: bool = True,
    ) -> DraftParts:
        """Find the arrays by name. `config` and `caches` are the target's; `reports` as in `TreeKernels`."""
        kernels = TreeKernels(
            launcher, config, arrays, caches, rings, device,
            draft_vocab=candidate_vocab(draft), position_offset=int(draft.config.reads_states), reports=reports,
        )  # fmt: skip
        forward, blocks = draft_forward(draft, own_caches, device, launcher, gemm, arrays), None
        if forward is not None and draft.block_rows:
            blocks = BlockKernels(launcher, draft, arrays, forward.markov_weights(), device)
        return cls(draft, kernels, forward, blocks)

    def modules(self) -> tuple[Module, ...]:
        """Return the modules of the kernels that are launched beside the forwards."""
        return (*self.kernels.modules(), *block_modules(self.draft))

    def load(self) -> None:
        """Load these kernels without running one."""
        self.kernels.load()
        if self.blocks is not None:
            self.blocks.load()

    def step(self, ops: DraftLaunches, shape: TreeShape, num_waiting: int | None = None) -> Callable[[], None]:
        """Return a function that launches a speculative step of this shape.

        The step begins with a pass over `num_waiting` rows, or `waiting_rows` if None; prompt lookup has no such pass.
        """
        rows, block_rows = num_waiting or waiting_rows(self.draft), self.draft.block_rows
        if self.forward is None:
            rows = 0
        if block_rows:
            return partial(speculate_block, ops, shape, rows, block_rows)
        return partial(speculate if self.draft.inner is None else speculate_chain, ops, shape, rows)

    def passes(self, shape: TreeShape) -> None:
        """Run the draft's passes of a step of this shape, over the rows that the last step left."""
        if self.forward is None:
            return
        self.forward.waiting(waiting_rows(self.draft))
        if self.draft.block_rows:
            self.forward.block(self.draft.block_rows)
        elif self.draft.inner is None:
            for _ in range(shape.num_passes - 1):
                self.forward.frontier(shape.top_k)


class DraftLaunches:
    """The operations of the drafting procedure as launches (`speculation.procedure.BlockOps`, `ChainOps`).

    The kernels read the step's slots, at most `num_trees`, from its command; the operations' numbers of rows are those
    of one slot. `inner`: the launches of a small model's own draft. With `ring` nodes have masks: the device reports
    the tree, and the host finds the masks while the target runs. `kind`: that of all nodes (`Rows.kind`).
    `is_screened`: whether the target's head is screened, as in `TreeForward.tree`.
    """

    def __init__(
        self,
        parts: DraftParts,
        target: TreeForward,
        arrays: Mapping[str, Any],
        inner: InnerSteps | None = None,
        ring: TreeRing | None = None,
        num_trees: int = 1,
        kind: RowKind = ANY_ROWS,
        *,
        is_screened: bool = False,
    ):
        self._num_trees, self._kind, self._is_screened = num_trees, kind, is_screened
        self._draft, self._kernels, self._forward = parts.draft, parts.kernels, parts.forward
        self._blocks, self._target, self._inner, self._ring = parts.blocks, target, inner, ring
        self._logits: DeviceArray = arrays["logits"]
        self._token_map: DeviceArray | None = arrays.get("draft.token_map")
        self._hidden_states: DeviceArray | None = arrays["hidden"] if parts.draft.config.hidden_width else None

    @property
    def _model(self) -> DraftForward:
        assert self._forward is not None
        return self._forward

    def begin(self, num_rows: int) -> None:
        self._kernels.speculate_begin(num_rows, self._hidden(num_rows * self._num_trees), self._num_trees)

    def waiting(self, num_rows: int) -> None:
        self._model.waiting(num_rows * self._num_trees, self._num_trees)

    def top_k(self, shape: TreeShape, rows: slice) -> None:
        rows = self._of_all(rows)
        logits = self._model.logits(rows.stop - rows.start)
        self._kernels.top_k(logits, shape.top_k, self._token_map, first_row=rows.start)

    def grow(self, shape: TreeShape, depth: int, rows: slice) -> None:
        outputs, parents = self._model.outputs(self._of_all(rows)), self._model.parents(shape.top_k * self._num_trees)
        self._kernels.tree_grow(shape, depth, outputs, parents, self._num_trees)

    def frontier(self, num_rows: int) -> None:
        self._model.frontier(num_rows * self._num_trees)

    def finish(self, shape: TreeShape) -> None:
        self._kernels.tree_finish(shape, self._num_trees)

    def block(self, num_rows: int) -> None:
        self._block_kernels.block_begin(self._num_trees)
        self._model.block(num_rows * self._num_trees)

    def chain(self, shape: TreeShape) -> None:
        num_rows = self._draft.block_rows * self._num_trees
        logits, states = self._model.logits(num_rows), self._model.block_states(num_rows)
        self._block_kernels.markov_chain(shape, logits, states, self._token_map, self._num_trees)

    def inner_steps(self, shape: TreeShape) -> None:
        assert self._inner is not None
        self._kernels.top_k(self._model.logits(1), 1, first_row=waiting_rows(self._draft) - 1)
        self._inner.chain(shape)

    @property
    def _block_kernels(self) -> BlockKernels:
        assert self._blocks is not None
        return self._blocks

    def lookup(self, shape: TreeShape) -> None:
        self._kernels.lookup(shape, self._num_trees)

    def lookup_instead(self, shape: TreeShape) -> None:
        self._kernels.lookup_instead(shape, self._num_trees)

    def verify(self, shape: TreeShape) -> None:
        if self._ring is not None:
            self._kernels.report_tree(shape, self._ring)
        num_rows = shape.num_nodes * self._num_trees
        self._target.tree(num_rows, is_screened=self._is_screened, kind=self._kind)

    def sample(self, shape: TreeShape) -> None:
        if self._ring is not None:
            self._kernels.sample_masked_tree(self._logits[: shape.num_nodes], self._ring)
        else:
            self._kernels.sample_tree(self._logits[: shape.num_nodes * self._num_trees], self._num_trees)

    def accept(self, shape: TreeShape) -> None:
        hidden = self._hidden(shape.num_nodes * self._num_trees)
        self._kernels.accept(shape, hidden, self._draft.forced_accept, self._num_trees)
        self._target.path_accepted(self._num_trees, shape.num_nodes)

    def catch_up_begin(self, num_rows: int) -> None:
        self._kernels.catch_up_begin(num_rows, self._hidden(num_rows))

    def catch_up_end(self) -> None:
        if self._inner is not None:
            self._inner.catch_up()
        self._kernels.catch_up_end()

    def chunk_begin(self, num_rows: int) -> None:
        # One row more than the chunk has: row 0 is for the state that the chunk before has left.
        self._kernels.prefill_rows(num_rows, self._hidden(num_rows + 1))

    def chunk(self, num_rows: int) -> None:
        self._model.chunk(num_rows)
        if self._inner is not None:
            self._inner.chunk(num_rows)

    def carry(self, num_rows: int) -> None:
        self._kernels.carry_rows(num_rows, self._hidden(num_rows))

    def _of_all(self, rows: slice) -> slice:
        """Return the rows of all trees, given those of one.

        A pass over waiting tokens interleaves the trees, so that their newest rows come last.
        """
        return slice(rows.start * self._num_trees, rows.stop * self._num_trees)

    def _hidden(self, num_rows: int) -> DeviceArray | None:
        """Return the target's states that the draft reads; None where it reads none."""
        return self._hidden_states[:num_rows] if self._hidden_states is not None else None

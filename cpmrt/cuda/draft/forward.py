"""The draft's passes on the GPU: over a prefill chunk, over tokens that wait, over a frontier of the tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.draft.memory import SCRATCH
from cpmrt.cuda.draft.several import captured_counts, waiting_rows
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.attention.attention import AttentionPlan
from cpmrt.cuda.ops.cuda_ops import CudaOps
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.ops.linear_packed.layout import PackedWeight
from cpmrt.memory.caches import CacheLayout
from cpmrt.models.draft import PREFIX, Draft, DraftModel
from cpmrt.models.drafts.dspark import MarkovWeights
from cpmrt.ops import ANY_ROWS, RowKind, Rows
from cpmrt.speculation.procedure import MAX_WAITING


class DraftForward:
    """Launches the passes of a draft with layers on the regions of a memory plan.

    The kernels of drafting write the rows of a pass to the arrays `draft_*` before it.
    """

    def __init__(
        self,
        draft: Draft,
        device: Device,
        launcher: Launcher,
        gemm: Gemm,
        arrays: Mapping[str, Any],
        caches: CacheLayout,
    ):
        config = draft.config.layers_config
        self._draft, self._arrays = draft.config, arrays
        taps = draft.inner.config.taps if draft.inner else ()
        self._model = DraftModel.bind(draft.config, arrays, caches, _fc_halves(arrays), taps)
        self._left: DeviceArray | None = arrays.get(f"{PREFIX}hidden")
        """The array in which a small model leaves the states that its own draft reads; None if it has no draft."""
        scratch = {name.removeprefix(SCRATCH): array for name, array in arrays.items() if name.startswith(SCRATCH)}
        scratch |= {"slots": arrays["draft_slots"], "chunk": arrays["draft_chunk"]}
        plan = AttentionPlan.of(config.attention, device, caches, max_rows=len(arrays["draft.x"]))
        self._ops = CudaOps(device, launcher, gemm, scratch, plan)

    def chunk(self, num_rows: int) -> None:
        """Run the rows of a prefill chunk; nothing is drafted."""
        self._model.see(self._ops, self._rows(num_rows, is_prefill=True), self._hidden(num_rows))

    def waiting(self, num_rows: int, num_newest: int = 1) -> None:
        """Run at most 64 tokens that the draft has not seen. Unless it drafts blocks, the last `num_newest` have
        logits, which are in the first rows."""
        if self._draft.block is not None:
            self.see(num_rows)
            return
        last = slice(num_rows - num_newest, num_rows)
        self._model.forward(self._ops, self._rows(num_rows), self._hidden(num_rows), last, is_first=True)

    def see(self, num_rows: int) -> None:
        """Run at most 64 tokens that the draft has not seen; nothing is drafted."""
        self._model.see(self._ops, self._rows(num_rows), self._hidden(num_rows))

    def block(self, num_rows: int) -> None:
        """Run the rows of blocks; their outputs and logits are `block_states` and `logits`."""
        self._model.block(self._ops, replace(self._rows(num_rows), reach=self._arrays["draft_reach"][:num_rows]))

    def block_states(self, num_rows: int) -> DeviceArray:
        """Return the normalised outputs of the last blocks."""
        states: DeviceArray = self._arrays["draft.states"]
        return states[:num_rows]

    def markov_weights(self) -> MarkovWeights:
        """Return the weights of the Markov head, which chooses the tokens of a block."""
        return self._model.markov_weights()

    def frontier(self, num_rows: int) -> None:
        """Run rows of a tree's newest level; all have logits."""
        a = self._arrays
        places = (a[name][:num_rows] for name in ("draft_locations", "draft_masks", "draft_base"))
        left = None if self._left is None else self._left[:num_rows]
        hidden = a["draft.parents"][:num_rows] if self._draft.is_eagle else left
        self._model.forward(self._ops, self._rows(num_rows, *places), hidden, slice(num_rows), is_first=False)

    @property
    def tree_kinds(self) -> tuple[RowKind, ...]:
        """The row kinds of nodes: ANY_ROWS alone, since a small model has no sparse attention."""
        return (ANY_ROWS,)

    def screenings(self, num_rows: int) -> tuple[bool, ...]:
        """Return only False: no step of a small model screens its head."""
        return (False,)

    def tree(self, num_rows: int, *, is_screened: bool = False, kind: RowKind = ANY_ROWS) -> None:
        """Run the nodes of a tree that was drafted for a small model; all have logits."""
        assert kind == ANY_ROWS and not is_screened, (kind, is_screened)
        self.frontier(num_rows)

    def path_accepted(self, num_trees: int, tree_nodes: int) -> None:
        """Do nothing: a small model's keys and values are in 16 bits, and those of the path are at their positions."""

    def outputs(self, rows: slice) -> DeviceArray | None:
        """Return rows of the last pass' output, which the next pass of an EAGLE draft reads; None for other drafts."""
        return self._arrays["draft.x"][rows] if self._draft.is_eagle else None

    def parents(self, num_rows: int) -> DeviceArray | None:
        """Return the array of the parents' outputs that a `frontier` pass of an EAGLE draft reads; None for others."""
        return self._arrays["draft.parents"][:num_rows] if self._draft.is_eagle else None

    def logits(self, num_rows: int) -> DeviceArray:
        """Return the logits of the last pass; row 0 is that of the first row that has logits."""
        logits: DeviceArray = self._arrays["draft.logits"]
        return logits[:num_rows]

    def _hidden(self, num_rows: int) -> DeviceArray | None:
        """Return the target's states that the rows read; for a small model with a draft, where its own states go.

        These begin in row 1, because row 0 keeps the state before the first row.
        """
        if self._left is not None:
            return self._left[1 : num_rows + 1]
        return self._arrays["hidden"][:num_rows] if self._draft.hidden_width else None

    def _rows(self, num_rows: int, *places: DeviceArray, is_prefill: bool = False) -> Rows:
        a = self._arrays
        tokens, positions, slots = (a[f"draft_{name}"][:num_rows] for name in ("token_ids", "positions", "slots"))
        return Rows(tokens, positions, slots, a["block_tables"], is_prefill, *places)


def draft_forward(
    draft: Draft,
    caches: CacheLayout | None,
    device: Device,
    launcher: Launcher,
    gemm: Gemm,
    arrays: Mapping[str, Any],
) -> DraftForward | None:
    """Return the passes of a draft, bound to its arrays; None for a draft without layers."""
    return None if caches is None else DraftForward(draft, device, launcher, gemm, arrays, caches)


class TreeForward(Protocol):
    """The target's part in a speculative step."""

    @property
    def tree_kinds(self) -> tuple[RowKind, ...]:
        """The row kinds of nodes for which `tree` has launches of its own, ANY_ROWS last."""
        ...

    def screenings(self, num_rows: int) -> tuple[bool, ...]:
        """Return the values that `is_screened` may have for a tree step of `num_rows` rows."""
        ...

    def tree(self, num_rows: int, *, is_screened: bool = False, kind: RowKind = ANY_ROWS) -> None:
        """Run the nodes of draft trees, all of this kind; all have logits, with `is_screened` -infinity where no node
        can choose the token."""
        ...

    def path_accepted(self, num_trees: int, tree_nodes: int) -> None:
        """Update the caches to the accepted path of each tree of `tree_nodes` nodes.

        In pages of 16 bits its keys and values are at their positions already.
        """
        ...


def every_shape(
    draft: Draft,
    target: TreeForward,
    forward: DraftForward | None,
    buckets: tuple[int, ...],
    most: tuple[int, ...],
) -> None:
    """Run each forward of steps with a draft once: the target's over trees, the draft's over all that it sees.

    `most`: the most sequences of a step, for each shape.
    """
    steps = [(shape, count) for shape, at_most in zip(draft.shapes, most, strict=True)
             for count in captured_counts(at_most)]  # fmt: skip
    for shape, count in steps:
        num_rows = count * shape.num_nodes
        for kind in target.tree_kinds:
            for is_screened in target.screenings(num_rows):
                target.tree(num_rows, is_screened=is_screened, kind=kind)
    target.path_accepted(1, draft.max_tree_size)
    if forward is None:
        return
    for bucket in buckets:
        forward.chunk(bucket)
    forward.waiting(MAX_WAITING)
    for count in dict.fromkeys(count for _, count in steps):
        forward.waiting(count * waiting_rows(draft), count)
        if draft.block_rows:
            forward.block(count * draft.block_rows)
    for shape, count in steps:
        if shape.num_passes > 1 and not draft.block_rows:
            forward.frontier(count * shape.top_k)


def every_inner_shape(
    draft: Draft, small: DraftForward, forward: DraftForward | None, buckets: tuple[int, ...]
) -> None:
    """Run each forward of the steps of a small model with a draft of its own, `forward`, once."""
    assert draft.inner is not None
    every_shape(draft.inner, small, forward, buckets, (1,))
    if forward is not None:
        for count in (waiting_rows(draft), MAX_WAITING):
            forward.see(count)


def _fc_halves(arrays: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a split `fc` as the two matrices that it holds one after the other; nothing where there is none."""
    whole = arrays.get("draft.fc_halves")
    if whole is None:
        return ()
    half = whole.shape[0] // 2
    return whole.halves() if isinstance(whole, PackedWeight) else (whole[:half], whole[half:])

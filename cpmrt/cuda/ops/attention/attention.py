"""The attention ops of one kind of layer: plans of all their kernels, their workspace, and which kernel takes which
rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from cpmrt.config import SparseConfig
from cpmrt.config.layers import GroupedAttention
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.attention.decode import (
    AttentionLaunch,
    AttentionScratch,
    DecodePlan,
    Operands,
    attend_rows,
)
from cpmrt.cuda.ops.attention.prefill import ExpandedPages, PrefillPlan, attend_chunk
from cpmrt.cuda.ops.attention.selected import SelectedChunkPlan, attend_selected_chunk, dense_rows, selected_launch
from cpmrt.cuda.ops.attention.tree import shares_pages, tree_launch
from cpmrt.cuda.ops.selection import BlockChoice, SelectionPlan
from cpmrt.models.layers import EMBED, HEAD
from cpmrt.ops import NOTHING, Handoff, KVPages, Rows, Selection, check_shapes
from cpmrt.tensor_spec import BufferSpec


@dataclass(frozen=True)
class AttentionPlan:
    """How a layer's attention is computed on a device; `selection` and `selected` only with sparse attention."""

    decode: DecodePlan
    prefill: PrefillPlan
    selection: SelectionPlan | None = None
    selected: SelectedChunkPlan | None = None

    @classmethod
    def of(
        cls, shape: GroupedAttention, device: Device, max_context: int, max_rows: int, *, is_fp8: bool = False
    ) -> AttentionPlan:
        """Plan for steps of at most `max_rows` rows."""
        plan = cls(
            DecodePlan.of(shape, device, max_context, is_fp8=is_fp8), PrefillPlan.of(shape, device.capability)
        )  # fmt: skip
        if shape.sparse is None:
            return plan
        selection = SelectionPlan.of(shape, device, max_context, max_rows)
        return replace(plan, selection=selection, selected=SelectedChunkPlan.of(shape, device, max_context))

    @property
    def tables(self) -> tuple[BufferSpec, ...]:
        """The workspace, which lives as long as the executor, except that of pages in fp8 (`ExpandedPages`)."""
        if self.selection is None:
            return self.decode.tables
        dense_chunk = BufferSpec("dense_chunk", (4,), EMBED, HEAD, np.int32)
        return (*self.decode.tables, *self.selection.tables, dense_chunk)


def step_launch(
    plan: DecodePlan, rows: int, *, is_tree: bool, window: int = 0, is_selected: bool = False
) -> AttentionLaunch:
    """Choose the kernel for so many rows of a step: of trees or not, that see all keys or chose blocks."""
    if is_selected and plan.has_own_kernels:
        return selected_launch(plan, rows, is_tree=is_tree)
    if is_tree and not is_selected and shares_pages(plan, rows):
        return tree_launch(plan, rows, window)
    return plan.launch(rows, replace(plan.constants, tree=is_tree, window=window, selected=int(is_selected)))


class AttentionOps:
    """The ops `select_blocks`, `decode_attention` and `prefill_attention` of `ops.protocol.Ops`.

    `arrays` holds the plan's workspace by name, and `chunk`: slot, start and count of a prefill chunk.
    """

    def __init__(self, launcher: Launcher, plan: AttentionPlan, arrays: Mapping[str, DeviceArray]):
        self._launch, self._plan = launcher, plan
        self._scratch = AttentionScratch(arrays["attention_partials"], arrays["attention_arrivals"])
        self._expanded = ExpandedPages.of(arrays)
        self._chunk, self._dense_chunk = arrays["chunk"], arrays.get("dense_chunk")
        self._choose = None if plan.selection is None else BlockChoice(launcher, plan.selection, arrays)

    def select_blocks(
        self, blocks: DeviceArray, q: DeviceArray, kv: KVPages, rows: Rows, scale: float, config: SparseConfig
    ) -> None:
        assert self._choose is not None and kv.compressed is not None, "planned without sparse attention"
        check_shapes(
            "select_blocks", blocks=blocks, q=q, k1=kv.compressed.k1, k2=kv.compressed.k2, k=kv.scored_keys,
            positions=rows.positions, slots=rows.slots, block_tables=rows.block_tables, tree_masks=rows.tree_masks,
            tree_base=rows.tree_base,
        )  # fmt: skip
        self._choose(Operands(blocks, q, kv, rows, scale), config)

    def decode_attention(
        self,
        out: DeviceArray,
        q: DeviceArray,
        kv: KVPages,
        rows: Rows,
        scale: float,
        window: int = 0,
        selection: Selection | None = None,
        after: Handoff = NOTHING,
    ) -> None:
        check_shapes(
            "decode_attention", out=out, q=q, k=kv.k, v=kv.v, positions=rows.positions, tree_masks=rows.tree_masks,
            tree_base=rows.tree_base, blocks=selection and selection.blocks,
        )  # fmt: skip
        is_tree, is_selected = rows.tree_masks is not None, selection is not None
        one = step_launch(self._plan.decode, len(q), is_tree=is_tree, window=window, is_selected=is_selected)
        given = Operands(out, q, kv, rows, scale, selection)
        attend_rows(self._launch, one, self._scratch, given, prefers_shared=after.prefers_shared)

    def prefill_attention(
        self,
        out: DeviceArray,
        q: DeviceArray,
        kv: KVPages,
        rows: Rows,
        scale: float,
        window: int = 0,
        selection: Selection | None = None,
    ) -> None:
        check_shapes(
            "prefill_attention", out=out, q=q, k=kv.k, v=kv.v, positions=rows.positions,
            blocks=selection and selection.blocks,
        )  # fmt: skip
        given = Operands(out, q, kv, rows, scale)
        if self._expanded is not None:
            given = self._expanded.expand(self._launch, given, self._chunk)
        if selection is None:
            attend_chunk(self._launch, self._plan.prefill, given, self._chunk, window)
            return
        assert self._plan.selected is not None and self._dense_chunk is not None, "planned without sparse attention"
        dense_rows(self._launch, self._dense_chunk, self._chunk, selection.config)
        attend_chunk(self._launch, self._plan.prefill, given, self._dense_chunk)
        attend_selected_chunk(self._launch, self._plan.selected, given, self._chunk, selection)

"""The attention ops of one kind of layer: the plans of their kernels, their workspace, and which kernel takes which
rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from cpmrt.config import SparseConfig
from cpmrt.config.layers import GroupedAttention
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.attention import Operands, prefill
from cpmrt.cuda.ops.attention.decode import AttentionLaunch, AttentionScratch, DecodePlan, attend_rows
from cpmrt.cuda.ops.attention.qkv import HeldQkv, HeldRowAttention
from cpmrt.cuda.ops.attention.selected import SelectedChunkPlan, attend_selected_chunk, dense_rows, selected_launch
from cpmrt.cuda.ops.attention.tree import shares_pages, tree_launch
from cpmrt.cuda.ops.kv import is_fp8
from cpmrt.cuda.ops.linear_packed.held_layers import HeldLayers
from cpmrt.cuda.ops.selection import BlockChoice, SelectionPlan
from cpmrt.memory.caches import CacheLayout
from cpmrt.models.layers import EMBED, HEAD
from cpmrt.ops import NOTHING, Handoff, KVPages, RowLength, Rows, Selection, check_shapes
from cpmrt.tensor_spec import BufferSpec


@dataclass(frozen=True)
class AttentionPlan:
    """The plans by which layers with these `caches` attend on a device; `selection` and `selected` only with sparse
    attention."""

    caches: CacheLayout
    decode: DecodePlan
    prefill: prefill.PrefillPlan
    selection: SelectionPlan | None = None
    selected: SelectedChunkPlan | None = None

    @classmethod
    def of(cls, shape: GroupedAttention, device: Device, caches: CacheLayout, max_rows: int) -> AttentionPlan:
        """Plan for steps of at most `max_rows` rows."""
        context = caches.max_context
        decode = DecodePlan.of(shape, device, context, is_fp8=is_fp8(caches))
        plan = cls(caches, decode, prefill.PrefillPlan.of(shape, device.capability))
        if shape.sparse is None:
            return plan
        selection = SelectionPlan.of(shape, device, context, max_rows)
        return replace(plan, selection=selection, selected=SelectedChunkPlan.of(shape, device, context))

    def has_long_launch(self, rows: int) -> bool:
        """Whether `rows` long rows of a step are launched otherwise than rows of any length."""
        return self.selection is None and self._depends_on(rows, "long")

    def has_short_launch(self, rows: int) -> bool:
        """Whether `rows` short rows of a step that see all keys are launched otherwise than rows of any length."""
        return self._depends_on(rows, "short")

    def _depends_on(self, rows: int, length: RowLength) -> bool:
        of_length = step_launch(self.decode, rows, is_tree=False, length=length)
        return of_length != step_launch(self.decode, rows, is_tree=False)

    @property
    def tables(self) -> tuple[BufferSpec, ...]:
        """The buffers of attention that live as long as the executor."""
        dense_chunk = BufferSpec("dense_chunk", (4,), EMBED, HEAD, np.int32)
        sparse = () if self.selection is None else (*self.selection.tables, dense_chunk)
        return (*self.decode.tables, *sparse, *(prefill.expanded_tables(self.caches) if is_fp8(self.caches) else ()))

    @property
    def workspace(self) -> tuple[BufferSpec, ...]:
        """The buffers that live during attention only."""
        return prefill.expanded_workspace(self.caches) if is_fp8(self.caches) else ()


def step_launch(
    plan: DecodePlan, rows: int, *, is_tree: bool, window: int = 0, is_selected: bool = False,
    length: RowLength | None = None,
) -> AttentionLaunch:  # fmt: skip
    """Return the launch for `rows` rows of a step, of trees or not, that see all keys, a window of them or the blocks
    that they chose. With a window `length` has no effect."""
    if is_selected and plan.has_selected_kernel:
        return selected_launch(plan, rows, is_tree=is_tree)
    if is_tree and not is_selected and shares_pages(plan, rows):
        return tree_launch(plan, rows, window)
    constants = replace(plan.constants, tree=is_tree, window=window, selected=int(is_selected))
    return plan.launch(rows, constants, length=length if window == 0 else None)


class AttentionOps:
    """The ops `select_blocks`, `decode_attention` and `prefill_attention` of `ops.protocol.Ops`.

    `arrays` holds the plan's workspace by name, and `chunk`: slot, start and count of a prefill chunk. `layers` may
    hold back the attention of one row and launch it together with the products around it.
    """

    def __init__(
        self, launcher: Launcher, plan: AttentionPlan, arrays: Mapping[str, DeviceArray],
        layers: HeldLayers | None = None,
    ):  # fmt: skip
        self._launch, self._plan, self._layers = launcher, plan, layers
        self._scratch = AttentionScratch(arrays["attention_partials"], arrays["attention_arrivals"])
        names = ("expanded_k", "expanded_v", "expanded_tables")
        self._expanded = prefill.ExpandedPages(*(arrays[name] for name in names)) if is_fp8(plan.caches) else None
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
        self, out: DeviceArray, q: DeviceArray, kv: KVPages, rows: Rows, scale: float, window: int = 0,
        selection: Selection | None = None, after: Handoff = NOTHING, *, is_projected: bool = False,
    ) -> Handoff:  # fmt: skip
        """Launch the op `decode_attention`, or hold it for the launch of the output projection, which gets it in the
        handoff."""
        check_shapes(
            "decode_attention", out=out, q=q, k=kv.k, v=kv.v, positions=rows.positions, tree_masks=rows.tree_masks,
            tree_base=rows.tree_base, blocks=selection and selection.blocks,
        )  # fmt: skip
        if isinstance(after.prepared, HeldQkv):
            assert window == 0 and selection is None, "held for a row that sees everything"
            both = HeldRowAttention(after.prepared, self._scratch, Operands(out, q, kv, rows, scale))
            return Handoff(both) if is_projected else both.launch(self._launch)
        is_tree, is_selected, length = rows.tree_masks is not None, selection is not None, rows.kind.length
        one = step_launch(
            self._plan.decode, len(q), is_tree=is_tree, window=window, is_selected=is_selected, length=length
        )  # fmt: skip
        given = Operands(out, q, kv, rows, scale, selection)
        launch_one = partial(attend_rows, self._launch, one, self._scratch, given, prefers_shared=after.prefers_shared)
        held = (given, self._plan.decode, self._scratch, launch_one)
        if self._layers is None or window or not self._layers.takes_attention(*held):
            launch_one()
        return NOTHING

    def prefill_attention(
        self, out: DeviceArray, q: DeviceArray, kv: KVPages, rows: Rows, scale: float, window: int = 0,
        selection: Selection | None = None,
    ) -> None:  # fmt: skip
        check_shapes(
            "prefill_attention", out=out, q=q, k=kv.k, v=kv.v, positions=rows.positions,
            blocks=selection and selection.blocks,
        )  # fmt: skip
        given = Operands(out, q, kv, rows, scale)
        if self._expanded is not None:
            given = self._expanded.expand(self._launch, given, self._chunk)
        if selection is None:
            prefill.attend_chunk(self._launch, self._plan.prefill, given, self._chunk, window)
            return
        assert self._plan.selected is not None and self._dense_chunk is not None, "planned without sparse attention"
        dense_rows(self._launch, self._dense_chunk, self._chunk, selection.config)
        prefill.attend_chunk(self._launch, self._plan.prefill, given, self._dense_chunk)
        attend_selected_chunk(self._launch, self._plan.selected, given, self._chunk, selection)

"""The forward pass of a step in each of its shapes: run, captured, or recorded to learn what it needs compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from cpmrt.config import ModelConfig
from cpmrt.config.layers import GroupedAttention
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.attention.attention import AttentionPlan
from cpmrt.cuda.ops.attention.decode import DecodePlan
from cpmrt.cuda.ops.attention.qkv import has_short_row
from cpmrt.cuda.ops.cuda_ops import CudaOps, attention_plan
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.ops.kv import accept_nodes, compress_path
from cpmrt.cuda.ops.screened_head import COPY, ScreenedHead, ScreenPlan
from cpmrt.executor import MAX_ROWS
from cpmrt.memory.caches import CacheLayout
from cpmrt.models.decoder import BoundLayer, Decoder
from cpmrt.models.mixers.grouped import BoundAttention, kv_pages
from cpmrt.ops import ANY_ROWS, RowKind, Rows


class StepForward:
    """Launches the model's layers and head on `arrays`: the regions of a memory plan with `caches`, by name.

    While `launcher` records, the arrays may be stand-ins that have only shapes. If `hidden` is among them, every pass
    leaves in it the states that a draft reads: the inputs of the layers `taps`, or without taps the final norm's
    output. `results`: the address of the ring in which a screened head reports how many tokens it computed exactly.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: Device,
        launcher: Launcher,
        gemm: Gemm,
        arrays: Mapping[str, Any],
        caches: CacheLayout,
        taps: tuple[int, ...] = (),
        results: np.uint64 | None = None,
    ):
        self._model, self._arrays = Decoder.bind(config, arrays, caches, taps), arrays
        step_rows = len(arrays["latent_queries"]) if "latent_queries" in arrays else MAX_ROWS
        plan = attention_plan(config, device, caches, len(arrays["x"]), step_rows)
        self._launch, self.ops = launcher, CudaOps(device, launcher, gemm, arrays, plan)
        self._attention = plan if isinstance(plan, AttentionPlan) else None
        self._has_short_row = self._attention is not None and _has_short_row(
            self._model.layers.layers[0], self._attention.decode, device
        )
        self.screen: ScreenedHead | None = None
        if f"{COPY}.codes" in arrays:
            head = self._model.head
            screen_plan = ScreenPlan.of(head.shape, device, len(arrays["screened_logits"]))
            self.screen = ScreenedHead(launcher, self.ops.lm_head, screen_plan, arrays, head, results)

    def of_each_kind(self) -> StepForward:
        """Return the forward with one layer of each kind, which launches the same kernels in every shape."""
        other = copy(self)
        other._model = self._model.of_each_kind()
        return other

    def every_shape(self, buckets: Iterable[int], row_counts: Iterable[int]) -> None:
        """Run each shape once: chunks of the buckets, decode steps of the row counts, and the head of a first token.

        The weights must be loaded, because this also makes the screen of the head.
        """
        if self.screen is not None:
            self.screen.fill()
        for bucket in buckets:
            self.chunk(bucket)
        for count in row_counts:
            for kind in self.row_kinds(count):
                for is_screened in self.screenings(count):
                    self.decode(count, is_screened=is_screened, kind=kind)
        self.head_of_first_row()

    def chunk(self, num_rows: int) -> None:
        """Run the rows of a prefill chunk through every layer; their states begin in row 1 of `hidden`."""
        self._layers(num_rows, first_state=1, is_prefill=True)

    def has_screen(self, num_rows: int) -> bool:
        """Whether a step of `num_rows` rows can do without reading the whole head."""
        return self.screen is not None and num_rows <= self.screen.most_rows

    def screenings(self, num_rows: int) -> tuple[bool, ...]:
        """Return the values that `is_screened` may have for a step of `num_rows` rows."""
        return (False, True) if self.has_screen(num_rows) else (False,)

    def row_kinds(self, num_rows: int) -> tuple[RowKind, ...]:
        """Return the row kinds for which a decode step of `num_rows` rows has launches of its own.

        The narrowest comes first, ANY_ROWS last.
        """
        kinds = self._kinds_of_any_length(num_rows)
        if self._has_short(num_rows):
            return (replace(kinds[0], length="short"), *kinds)
        has_long = self._attention is not None and self._attention.has_long_launch(num_rows)
        return (RowKind("long"), *kinds) if has_long else kinds

    def _kinds_of_any_length(self, num_rows: int) -> tuple[RowKind, ...]:
        """Return the row kinds that say nothing about lengths; rows of the first one see all keys."""
        if self._model.config.sparse is not None and num_rows == 1 and "draft_tree" not in self._arrays:
            return RowKind(is_inside=True, is_dense=True), RowKind(is_inside=True), ANY_ROWS
        return self.tree_kinds

    def _has_short(self, num_rows: int) -> bool:
        """Whether `num_rows` rows that see all keys have launches of their own where all are short."""
        if num_rows == 1 and self._has_short_row:
            return True
        return self._attention is not None and self._attention.has_short_launch(num_rows)

    def decode(self, num_rows: int, *, is_screened: bool = False, kind: RowKind = ANY_ROWS) -> None:
        """Run at most MAX_ROWS rows through every layer and the head.

        `is_screened`: logits of tokens that a row cannot choose are -infinity. `kind`: that of all rows (`Rows.kind`).
        """
        x = self._layers(num_rows, kind=kind)
        self._head(x, is_screened=is_screened, is_counted=True)

    @property
    def tree_kinds(self) -> tuple[RowKind, ...]:
        """The row kinds for which a pass over draft trees has launches of its own, ANY_ROWS last."""
        return (ANY_ROWS,) if self._model.config.sparse is None else (RowKind(is_dense=True), ANY_ROWS)

    def tree(self, num_rows: int, *, is_screened: bool = False, kind: RowKind = ANY_ROWS) -> None:
        """Run the nodes of draft trees through every layer and the head. Options as those of `decode`."""
        places = (self._arrays[name][:num_rows] for name in ("locations", "tree_masks", "tree_base"))
        x = self._layers(num_rows, *places, kind=kind)
        self._head(x, is_screened=is_screened, is_counted=False)

    def path_accepted(self, num_trees: int, tree_nodes: int) -> None:
        """Update the caches to the accepted path of each tree of `tree_nodes` nodes.

        In pages of 16 bits its keys and values are at their positions already. This writes the codes of pages in fp8
        and the compressed keys of sparse attention, and takes recurrent states, of one tree only, through the path.
        """
        a = self._arrays
        if "k_pages" in a or "k_codes" in a:
            pages, tree = kv_pages(a), (a["draft_tree"], a["block_tables"])
            accept_nodes(self._launch, pages, *tree, num_trees, tree_nodes)
            if pages.compressed is not None:
                compress_path(self._launch, pages, *tree, num_trees)
        self._model.layers.restore(self.ops, a, a["draft_tree"])

    def _layers(
        self, num_rows: int, *places: DeviceArray, first_state: int = 0, is_prefill: bool = False,
        kind: RowKind = ANY_ROWS,
    ) -> DeviceArray:  # fmt: skip
        """Run the rows at the front of the buffers through the layers; return the last layer's outputs."""
        arrays = self._arrays
        tokens, positions, slots = (arrays[name][:num_rows] for name in ("token_ids", "positions", "slots"))
        rows = Rows(tokens, positions, slots, arrays["block_tables"], is_prefill, *places, kind=kind)
        hidden = arrays["hidden"][first_state : first_state + num_rows] if "hidden" in arrays else None
        outputs: DeviceArray = self._model.forward(self.ops, arrays, rows, hidden)
        return outputs

    def _head(self, x: DeviceArray, *, is_screened: bool, is_counted: bool) -> None:
        """Compute the logits of a step's rows. `is_counted`: as in `ScreenedHead`."""
        logits = self._arrays["logits"][: len(x)]
        if not is_screened:
            self.head(logits, x)
            return
        assert self.screen is not None, "planned without a screen"
        norm, config = self._model.norm, self._model.config
        self.screen(logits, x, norm, config.rms_norm_eps, config.logit_divisor, is_counted=is_counted)

    def head_of_first_row(self) -> None:
        """Compute the logits of row 0."""
        self.head(self._arrays["logits"][:1], self._arrays["x"][:1])

    def head(self, logits: DeviceArray, x: DeviceArray) -> None:
        """Compute the logits of at most MAX_ROWS rows of the last layer's output."""
        self._model.logits(self.ops, logits, x)


def _has_short_row(layer: BoundLayer, decode: DecodePlan, device: Device) -> bool:
    """Whether one short row has launches of its own: for q, k and v, or for these and attention together."""
    mixer, bound = layer.config.mixer, layer.mixer
    if not isinstance(mixer, GroupedAttention) or not isinstance(bound, BoundAttention):
        return False
    if mixer.sparse is not None or mixer.window > 0 or not mixer.rope:
        return False
    return has_short_row(decode, device, bound.pages, bound.qkv)

"""The forward pass of a step in each of its shapes: run, captured, or recorded to learn what it needs compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cpmrt.config import ModelConfig
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.cuda_ops import CudaOps, attention_plan
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.ops.kv import accept_nodes, compress_path
from cpmrt.cuda.ops.lightning import accept_chain
from cpmrt.memory.caches import CacheLayout
from cpmrt.models.decoder import Decoder
from cpmrt.models.mixers.grouped import kv_pages
from cpmrt.ops import Rows


class StepForward:
    """Launches the model's layers and head on `arrays`: the regions of a memory plan with `caches`, by name.

    While `launcher` records they may be stand-ins that have only shapes. With a buffer `hidden` among them every pass
    leaves in it what a draft reads: what enters the layers `taps`, or without taps the final norm's output.
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
    ):
        self._model, self._arrays = Decoder.bind(config, arrays, caches, taps), arrays
        plan = attention_plan(config, device, caches, max_rows=len(arrays["x"]))
        self._launch, self.ops = launcher, CudaOps(device, launcher, gemm, arrays, plan)

    def every_shape(self, buckets: Iterable[int], row_counts: Iterable[int]) -> None:
        """Each shape once: chunks of the buckets, decode steps of the row counts, and the head of a first token."""
        for bucket in buckets:
            self.chunk(bucket)
        for count in row_counts:
            self.decode(count)
        self.head_of_first_row()

    def chunk(self, num_rows: int) -> None:
        """The rows of a prefill chunk through every layer; their states begin in row 1 of `hidden`."""
        self._layers(num_rows, None, first_state=1, is_prefill=True)

    def decode(self, num_rows: int) -> None:
        """Rows of at most MAX_ROWS sequences through every layer and the head."""
        self._layers(num_rows, slice(None))

    def tree(self, num_rows: int) -> None:
        """The nodes of a draft tree through every layer and the head."""
        places = (self._arrays[name][:num_rows] for name in ("locations", "tree_masks", "tree_base"))
        self._layers(num_rows, slice(None), *places)

    def path_accepted(self) -> None:
        """Take in the path of a tree, whose keys and values are at their positions in pages of 16 bits: codes in fp8,
        what sparse attention keeps of them, and recurrent states."""
        a = self._arrays
        if "k_pages" in a or "k_codes" in a:
            pages, tree = kv_pages(a), (a["draft_tree"], a["block_tables"])
            accept_nodes(self._launch, pages, *tree)
            if pages.compressed is not None:
                compress_path(self._launch, pages, *tree)
        if "lightning_chain" in a:
            states, chain, decay = (a[f"lightning_{name}"] for name in ("states", "chain", "decay"))
            accept_chain(self._launch, states, chain, decay, a["draft_tree"])

    def _layers(
        self, num_rows: int, logit_rows: slice | None, *places: Any, first_state: int = 0, is_prefill: bool = False
    ) -> None:
        """The rows at the front of the buffers."""
        arrays = self._arrays
        tokens, positions, slots = (arrays[name][:num_rows] for name in ("token_ids", "positions", "slots"))
        rows = Rows(tokens, positions, slots, arrays["block_tables"], is_prefill, *places)
        hidden = arrays["hidden"][first_state : first_state + num_rows] if "hidden" in arrays else None
        x = self._model.forward(self.ops, arrays, rows, hidden)
        if logit_rows is not None:
            self.head(arrays["logits"][:num_rows], x)

    def head_of_first_row(self) -> None:
        """Logits of row 0."""
        self.head(self._arrays["logits"][:1], self._arrays["x"][:1])

    def head(self, logits: Any, x: Any) -> None:
        """Logits of rows of the last layer's output, at most MAX_ROWS."""
        self._model.logits(self.ops, logits, x)

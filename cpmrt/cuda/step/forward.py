"""The forward pass of a step in each of its shapes: run, captured, or recorded to learn what it needs compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cpmrt.config import ModelConfig
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.attention.plan import decode_attention_of, plan_prefill_attention
from cpmrt.cuda.ops.cuda_ops import CudaOps
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.ops.selection import SparsePlans
from cpmrt.executor import MAX_ROWS
from cpmrt.models.decoder import forward, lm_head
from cpmrt.ops import Fp8Pages, Rows

_ROW_BUFFERS = ("x", "q", "q_nope", "attention", "inner", "blocks")
_PAGES = ("k_pages", "v_pages", "k1_pages", "k2_pages", "nope_pages")


class StepForward:
    """Launches the model's layers and head on `arrays`: the regions of a memory plan for `max_context`, by name.

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
        max_context: int,
        taps: tuple[int, ...] = (),
    ):
        self._config, self._arrays, self._taps = config, arrays, taps
        heads = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
        decode_plan = decode_attention_of(
            config, max_context, capability=device.capability, num_sms=device.num_sms, portable=device.is_portable,
            is_fp8=isinstance(arrays["k_pages"], Fp8Pages),
        )  # fmt: skip
        prefill_plan = plan_prefill_attention(**heads, arch=device.capability)
        is_sparse, max_rows = config.sparse is not None, len(arrays["x"])
        sparse = SparsePlans.of(config, device, max_context, max_rows) if is_sparse else None
        self._ops = CudaOps(config, launcher, gemm, arrays, device, decode_plan, prefill_plan, sparse)

    def every_shape(self, buckets: Iterable[int], row_counts: Iterable[int]) -> None:
        """Each shape once: chunks of the buckets, decode steps of the row counts, and the head of a first token."""
        for bucket in buckets:
            self.chunk(bucket)
        for count in row_counts:
            self.decode(count)
        self.head_of_first_row()

    def chunk(self, num_rows: int) -> None:
        """The rows of a prefill chunk through every layer; their states begin in row 1 of `hidden`."""
        self._layers(num_rows, None, first_state=1)

    def decode(self, num_rows: int) -> None:
        """Rows of at most MAX_ROWS sequences through every layer and the head."""
        self._layers(num_rows, slice(None))

    def tree(self, num_rows: int) -> None:
        """The nodes of a draft tree through every layer and the head."""
        places = (self._arrays[name][:num_rows] for name in ("locations", "tree_masks", "tree_base"))
        self._layers(num_rows, slice(None), *places)

    def path_accepted(self) -> None:
        """What sparse attention keeps of the path of a tree, once its keys and values are at their positions."""
        if self._ops.sparse is not None:
            self._ops.sparse.compress_path(self._arrays)

    def _layers(self, num_rows: int, logit_rows: slice | None, *places: Any, first_state: int = 0) -> None:
        """The rows at the front of the buffers."""
        arrays = self._arrays
        tokens, positions, slots = (arrays[name][:num_rows] for name in ("token_ids", "positions", "slots"))
        rows = Rows(tokens, positions, slots, arrays["block_tables"], num_rows > MAX_ROWS, *places)
        buffers = {name: arrays[name][:num_rows] for name in _ROW_BUFFERS if name in arrays}
        buffers |= {name: arrays[name] for name in (*_PAGES, "rope") if name in arrays}
        if "hidden" in arrays:
            buffers["hidden"] = arrays["hidden"][first_state : first_state + num_rows]
        if logit_rows is not None:
            buffers["logits"] = arrays["logits"][:num_rows]
        forward(self._ops, self._config, arrays, buffers, rows, logit_rows, self._taps)

    def head_of_first_row(self) -> None:
        """Logits of row 0."""
        self.head(self._arrays["logits"][:1], self._arrays["x"][:1])

    def head(self, logits: Any, x: Any) -> None:
        """Logits of rows of the last layer's output, at most MAX_ROWS."""
        lm_head(self._ops, self._config, self._arrays, logits, x)

"""Pages in fp8 on a GPU: what the kernels take of them, and pages in 16 bits for attention of a prefill chunk.

Decoding reads codes. A chunk's attention runs on tensor cores over pages that every 64 rows read again, so the pages of
the chunk's slot are first expanded, exactly, into a workspace of one layer, where page p of the slot is page p.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.memory.caches import CacheLayout
from cpmrt.models.layers import ATTENTION, EMBED, HEAD
from cpmrt.ops import Fp8Pages, Rows
from cpmrt.tensor_spec import BufferSpec

EXPAND_PAGES = KernelSpec("expand_pages", "attention/expand_pages.cu", "prefill_attention", ("HEAD_DIM",), hot=True)
_THREADS = 256
_MOST_BLOCKS = 512
"""In x: enough for every multiprocessor, few enough to find nothing to do in no time."""


def is_fp8(caches: CacheLayout) -> bool:
    """Whether keys and values are in fp8."""
    return "k_codes" in caches.specs


def expanded_workspace(caches: CacheLayout) -> tuple[BufferSpec, ...]:
    """Return the buffers for the keys and values of one sequence in one layer, in 16 bits."""
    shape = (caches.pages_per_sequence, *caches.specs["k_codes"].shape)
    return tuple(BufferSpec(name, shape, ATTENTION, ATTENTION) for name in ("expanded_k", "expanded_v"))


def expanded_tables(caches: CacheLayout) -> tuple[BufferSpec, ...]:
    """Return the block tables of the expanded pages, the same for every slot."""
    shape = (caches.max_sequences, caches.pages_per_sequence)
    return (BufferSpec("expanded_tables", shape, EMBED, HEAD, np.int32),)


def codes_of(pages: Any) -> Any:
    """The array that a kernel reads and writes."""
    return pages.codes if isinstance(pages, Fp8Pages) else pages


def scales_of(*pages: Any) -> tuple[Any, ...]:
    """What kernels compiled with FP8 take last."""
    return tuple(part.scales for part in pages if isinstance(part, Fp8Pages))


def fp8_constant(pages: Any) -> dict[str, int]:
    """The compile-time size that says so."""
    return {"FP8": int(isinstance(pages, Fp8Pages))}


def expand(
    launch: Launcher, scratch: Mapping[str, Any], k_pages: Fp8Pages, v_pages: Fp8Pages, rows: Rows
) -> tuple[Any, Any, Rows]:
    """Keys, values and rows in place of those of the chunk in `scratch`, whose pages are expanded."""
    out = scratch["expanded_k"], scratch["expanded_v"]
    num_pages, num_heads, _, head_dim = out[0].shape
    grid = (min(num_pages, _MOST_BLOCKS), 2 * num_heads)
    launch(
        EXPAND_PAGES, {"HEAD_DIM": head_dim}, grid, _THREADS,
        *out, k_pages.codes, v_pages.codes, *scales_of(k_pages, v_pages), rows.block_tables, scratch["chunk"],
        np.int32(num_heads), np.int32(rows.block_tables.shape[1]),
    )  # fmt: skip
    return *out, replace(rows, block_tables=scratch["expanded_tables"])

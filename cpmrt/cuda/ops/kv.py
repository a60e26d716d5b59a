"""Pages of keys and values in 16 bits or fp8 as kernels take them, and the compressed keys beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.executor import MAX_ROWS
from cpmrt.memory.caches import CacheLayout
from cpmrt.ops import Fp8Pages, KVPages, Rows

_WINDOW_ROWS = 16
"""Consecutive rows of which one ends a window of compressed keys."""
_PATH_WINDOWS = 5
"""Windows that may end within an accepted path."""


@dataclass(frozen=True)
class PageConstants:
    """Elements of a head, and whether pages hold fp8 codes."""

    head_dim: int
    fp8: bool


COMPRESS_KEYS = KernelSpec("compress_keys", "attention/compress_keys.cu", "qkv", PageConstants, hot=True)
COMPRESS_PATH = replace(COMPRESS_KEYS, name="compress_path", op="", reason="an accepted path")


def is_fp8(caches: CacheLayout) -> bool:
    """Return whether keys and values are in fp8."""
    return "k_codes" in caches.specs


def codes_of(pages: DeviceArray | Fp8Pages | None) -> DeviceArray | None:
    """Return the array of elements that a kernel reads and writes: the pages themselves, or their fp8 codes."""
    return pages.codes if isinstance(pages, Fp8Pages) else pages


def scales_of(*pages: DeviceArray | Fp8Pages) -> tuple[DeviceArray, ...]:
    """Return the arguments that a kernel compiled for fp8 pages takes last; none for pages in 16 bits."""
    return tuple(part.scales for part in pages if isinstance(part, Fp8Pages))


def compress_keys(launch: Launcher, kv: KVPages, rows: Rows) -> None:
    """Store the compressed keys of the windows that end at a row's position; the keys are stored already."""
    assert kv.compressed is not None, "planned without sparse attention"
    keys, num_rows = kv.scored_keys, len(rows.positions)
    _, num_kv_heads, _, head_dim = keys.shape
    rows_per_block = 1 if num_rows <= MAX_ROWS else _WINDOW_ROWS
    sizes = num_rows, rows_per_block, rows.block_tables.shape[1]
    launch(
        COMPRESS_KEYS, PageConstants(head_dim, isinstance(keys, Fp8Pages)),
        (-(-num_rows // rows_per_block), num_kv_heads, 2), head_dim // 2,
        kv.compressed.k1, kv.compressed.k2, codes_of(keys), rows.positions, rows.slots, rows.block_tables,
        *map(np.int32, sizes), *scales_of(keys),
    )  # fmt: skip


def compress_path(launch: Launcher, kv: KVPages, tree: DeviceArray, block_tables: DeviceArray) -> None:
    """Store the compressed keys of the windows that end within the accepted path of the draft `tree`.

    The arrays of `kv` are those of all layers [L, P, ...]; the keys of the path lie at their positions already.
    """
    assert kv.compressed is not None, "planned without sparse attention"
    num_layers, num_pages, num_kv_heads, _, head_dim = kv.scored_keys.shape
    launch(
        COMPRESS_PATH, PageConstants(head_dim, fp8=False), (num_layers * num_kv_heads, _PATH_WINDOWS), head_dim // 2,
        kv.compressed.k1, kv.compressed.k2, kv.scored_keys, tree, block_tables,
        *map(np.int32, (num_pages, num_kv_heads, block_tables.shape[1])),
    )  # fmt: skip

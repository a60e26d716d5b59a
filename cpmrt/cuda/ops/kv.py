"""Pages of keys and values in 16 bits or fp8 as kernels take them, and the compressed keys beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.executor import MAX_ROWS
from cpmrt.memory.caches import CacheLayout
from cpmrt.ops import WINDOW_STRIDE, Fp8Pages, KVPages, Rows

_PATH_WINDOWS = 5
"""The most windows of compressed keys that may end within an accepted path."""


@dataclass(frozen=True)
class PageConstants:
    """Compile-time constants of kernels on pages: elements of a head, and whether pages hold fp8 codes."""

    head_dim: int
    fp8: bool


COMPRESS_KEYS = KernelSpec("compress_keys", "attention/compress_keys.cu", "qkv", PageConstants, hot=True)
COMPRESS_PATH = replace(COMPRESS_KEYS, name="compress_path", op="", reason="an accepted path")
ACCEPT_NODES = KernelSpec(
    "accept_nodes", "attention/accept_nodes.cu", constants=("HEAD_DIM",), hot=True, reason="an accepted path"
)
_COPY_THREADS = 64


def is_fp8(caches: CacheLayout) -> bool:
    """Return whether keys and values are in fp8."""
    return "k_codes" in caches.specs


def codes_of(pages: DeviceArray | Fp8Pages | None) -> DeviceArray | None:
    """Return the array of elements that a kernel reads and writes: the pages themselves, or their fp8 codes."""
    return pages.codes if isinstance(pages, Fp8Pages) else pages


def scales_of(*pages: DeviceArray | Fp8Pages) -> tuple[DeviceArray, ...]:
    """Return the scales of fp8 pages, which a kernel compiled for them takes last; none for pages in 16 bits."""
    return tuple(part.scales for part in pages if isinstance(part, Fp8Pages))


def nodes_of(*pages: DeviceArray | Fp8Pages) -> tuple[DeviceArray, ...]:
    """Return codes, then scales, of the nodes of a draft tree beside fp8 pages; none for pages in 16 bits."""
    beside = [part for part in pages if isinstance(part, Fp8Pages)]
    return (*(part.nodes for part in beside), *(part.node_scales for part in beside))


def accept_nodes(
    launch: Launcher, kv: KVPages, trees: DeviceArray, block_tables: DeviceArray, num_trees: int, tree_nodes: int
) -> None:
    """Store the nodes of the accepted paths of the first draft `trees`, of `tree_nodes` each, in fp8 pages.

    The arrays of `kv` are those of all layers [L, P, ...]. Nothing is launched for pages in 16 bits, which have the
    paths already.
    """
    if not isinstance(kv.k, Fp8Pages):
        return
    num_layers, num_pages, num_kv_heads, _, head_dim = kv.k.shape
    sizes = num_pages, kv.k.nodes.shape[1], num_kv_heads, block_tables.shape[1], tree_nodes
    launch(
        ACCEPT_NODES, {"HEAD_DIM": head_dim}, (num_layers * num_kv_heads, 2, num_trees), _COPY_THREADS,
        codes_of(kv.k), codes_of(kv.v), *scales_of(kv.k, kv.v), *nodes_of(kv.k, kv.v), trees, block_tables,
        *map(np.int32, sizes),
    )  # fmt: skip


def compress_keys(launch: Launcher, kv: KVPages, rows: Rows) -> None:
    """Store the compressed keys of the windows that end at a row's position; the keys are stored already."""
    assert kv.compressed is not None, "planned without sparse attention"
    keys, num_rows = kv.scored_keys, len(rows.positions)
    _, num_kv_heads, _, head_dim = keys.shape
    rows_per_block = 1 if num_rows <= MAX_ROWS else WINDOW_STRIDE
    sizes = num_rows, rows_per_block, rows.block_tables.shape[1]
    launch(
        COMPRESS_KEYS, PageConstants(head_dim, isinstance(keys, Fp8Pages)),
        (-(-num_rows // rows_per_block), num_kv_heads, 2), head_dim // 2,
        kv.compressed.k1, kv.compressed.k2, codes_of(keys), rows.positions, rows.slots, rows.block_tables,
        *map(np.int32, sizes), *scales_of(keys),
    )  # fmt: skip


def compress_path(
    launch: Launcher, kv: KVPages, trees: DeviceArray, block_tables: DeviceArray, num_trees: int
) -> None:
    """Store the compressed keys of the windows that end within the accepted paths of the first draft `trees`.

    The arrays of `kv` are those of all layers [L, P, ...]; the keys of the path lie at their positions already.
    """
    assert kv.compressed is not None, "planned without sparse attention"
    keys = kv.scored_keys
    num_layers, num_pages, num_kv_heads, _, head_dim = keys.shape
    constants = PageConstants(head_dim, isinstance(keys, Fp8Pages))
    launch(
        COMPRESS_PATH, constants, (num_layers * num_kv_heads, _PATH_WINDOWS, num_trees), head_dim // 2,
        kv.compressed.k1, kv.compressed.k2, codes_of(keys), trees, block_tables,
        *map(np.int32, (num_pages, num_kv_heads, block_tables.shape[1])), *scales_of(keys),
    )  # fmt: skip

"""How a product of many rows of `linear/gemm.cu` is compiled and launched: tile sizes, grid and shared memory."""

from __future__ import annotations

from dataclasses import dataclass

TILE_ROWS = 128
# (TILE_K, STAGES) by TILE_N, the deepest pipeline first.
_PIPELINES = {256: ((64, 4), (64, 3), (32, 4)), 128: ((64, 3), (32, 3)), 64: ((32, 3),)}
# Narrow tiles read more of x for a product: the time of a column of y beside that in the widest tile (estimated).
_COLUMN_COST = {256: 1.0, 128: 1.1, 64: 1.3}
_RESERVED_BYTES = 1024
"""Of a block's shared memory, kept by the driver."""


@dataclass(frozen=True)
class GemmTile:
    """Compile-time constants of gemm.cu, and its launch: blocks, threads of a block, dynamic shared bytes."""

    constants: dict[str, int]
    grid: int
    block: int
    shared_bytes: int


def gemm_tile(num_rows: int, columns: int, inner: int, num_sms: int, shared_bytes_per_block: int) -> GemmTile:
    """The tile for Y [num_rows, columns] = X [num_rows, inner] W^T on a device with this much shared memory.

    No choice changes a bit of the result. Raises ValueError for a shape that the kernel does not take.
    """
    if num_rows < 1 or columns < 1 or inner < 1 or columns % 16 or inner % 32:
        raise ValueError(f"gemm takes N in multiples of 16 and K of 32, got M={num_rows} N={columns} K={inner}")
    row_tiles = -(-num_rows // TILE_ROWS)

    def cost(tile_n: int) -> float:
        # The multiprocessor with the most blocks ends last; its blocks share its tensor cores.
        return -(-row_tiles * -(-columns // tile_n) // num_sms) * tile_n * _COLUMN_COST[tile_n]

    tile_n = min(_PIPELINES, key=cost)
    tile_k, stages = _pipeline(tile_n, shared_bytes_per_block)
    return GemmTile(
        {"TILE_N": tile_n, "TILE_K": tile_k, "STAGES": stages},
        grid=row_tiles * -(-columns // tile_n),
        block=tile_n,
        shared_bytes=_shared_bytes(tile_n, tile_k, stages),
    )


def _pipeline(tile_n: int, shared_bytes_per_block: int) -> tuple[int, int]:
    """The deepest one that leaves room for 256 / tile_n blocks on a multiprocessor, else the smallest."""
    budget = (shared_bytes_per_block + _RESERVED_BYTES) * tile_n // 256 - _RESERVED_BYTES
    fitting = [choice for choice in _PIPELINES[tile_n] if _shared_bytes(tile_n, *choice) <= budget]
    return fitting[0] if fitting else _PIPELINES[tile_n][-1]


def _shared_bytes(tile_n: int, tile_k: int, stages: int) -> int:
    return (TILE_ROWS + tile_n) * tile_k * 2 * stages

"""Marlin as CPM.cu writes it: codes in the order of tensor-core fragments, symmetric, with the config.json of GPTQ.

Sources: IST-DASLab/marlin; `gptq_marlin_repack` of vLLM.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cpmrt.dtypes import Array
from cpmrt.tensor_spec import Product
from cpmrt.weights.formats.awq import AWQ_ORDER
from cpmrt.weights.formats.format import I32, SCALES, U8, Entries, Format, Part, Shape, pack_nibbles, unpack_nibbles

TILE = 16
RUN = 64
"""Rows (output features) that are permuted together."""
_FUSED: dict[Product | None, str] = {"qkv": "qkv_proj", "gate_up": "gate_up_proj"}


def fused_module(module: str, product: Product | None) -> str | None:
    """Return the module in which CPM.cu stores `module` fused with others of its product, or None if it does not."""
    fused = _FUSED.get(product)
    return fused and f"{module.rpartition('.')[0]}.{fused}"


def pack_codes(u: U8) -> I32:
    """Pack codes u [N, K] to `qweight` int32 [K/16, 2 N].

    Its 16 x 16 tiles are permuted, four neighbours together, to the order of tensor-core lanes.
    """
    num_rows, num_columns = u.shape
    tiles = u.T.reshape(num_columns // TILE, TILE, num_rows // TILE, TILE)
    runs = np.ascontiguousarray(tiles.transpose(0, 2, 1, 3)).reshape(num_columns // TILE, -1, 1024)
    return pack_nibbles(runs[:, :, _code_order()].reshape(num_columns // TILE, -1))


def unpack_codes(qweight: I32) -> U8:
    """Unpack `qweight` [K/16, 2 N], or a slice of its columns that holds whole runs of 64 rows of u, to u [N, K]."""
    num_tiles = qweight.shape[0]
    runs = unpack_nibbles(qweight).reshape(num_tiles, -1, 1024)
    tiles = runs[:, :, np.argsort(_code_order())].reshape(num_tiles, -1, TILE, TILE)
    columns = tiles.transpose(1, 3, 0, 2).reshape(qweight.shape[1] // 2, num_tiles * TILE)
    return np.ascontiguousarray(columns)


def pack_scales(scales: Array) -> Array:
    """Pack scales [N, groups] of any type to the tensor `scales` [groups, N]."""
    order = _scale_order(scales.shape[1] > 1)
    rows = np.ascontiguousarray(scales.T)
    return np.ascontiguousarray(rows.reshape(-1, len(order))[:, order]).reshape(rows.shape)


def unpack_scales(scales: Array) -> Array:
    """Unpack the tensor `scales` [groups, N] to scales [N, groups]."""
    inverse = np.argsort(_scale_order(scales.shape[0] > 1))
    rows = np.ascontiguousarray(scales).reshape(-1, len(inverse))[:, inverse].reshape(scales.shape)
    return np.ascontiguousarray(rows.T)


@lru_cache(maxsize=1)
def _code_order() -> NDArray[np.intp]:
    """Return the 1024 places of four tiles, in the order in which they are stored."""
    order = []
    for lane in range(32):
        column, row = lane // 4, lane % 4
        places = [
            TILE * in_tile + column + 8 * half
            for half in (0, 1)
            for in_tile in (2 * row, 2 * row + 1, 2 * row + 8, 2 * row + 9)
        ]
        order += [place + 256 * tile for tile in range(4) for place in places]
    return np.array(order, np.intp).reshape(-1, 8)[:, AWQ_ORDER].reshape(-1)


@lru_cache(maxsize=2)
def _scale_order(grouped: bool) -> NDArray[np.intp]:
    """Return which of 64 neighbouring scales (32 where a row is one group) is stored at each place."""
    if grouped:
        order = [place + 8 * step for place in range(8) for step in range(8)]
    else:
        order = [2 * pair + place for pair in range(4) for place in (0, 1, 8, 9, 16, 17, 24, 25)]
    return np.array(order, np.intp)


def _is_meant(module: str, shape: Shape, entries: Entries) -> bool:
    """Whether a module of a GPTQ checkpoint has codes of Marlin's shape and no zero points."""
    (num_rows, num_columns), codes = shape, entries.get(f"{module}.qweight")
    is_tiled = codes is not None and codes.shape == (num_columns // TILE, 2 * num_rows)
    return is_tiled and f"{module}.qzeros" not in entries


MARLIN = Format(
    "marlin",
    number=3,
    codes=Part("qweight", lambda n, k, groups: (k // TILE, 2 * n), pack_codes, unpack_codes),
    rows=lambda words, begin, end: words[:, 2 * begin : 2 * end],
    scales=Part("scales", lambda n, k, groups: (groups, n), pack_scales, unpack_scales, SCALES),
    row_step=RUN,
    column_step=TILE,
    settings="gptq",
    is_meant=_is_meant,
)

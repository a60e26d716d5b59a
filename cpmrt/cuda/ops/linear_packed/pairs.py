"""Which products of one row take two tiles a block, side by side."""

from __future__ import annotations

from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.linear import STARTS_EARLY
from cpmrt.cuda.ops.linear_packed.layout import RUNS, PackedLayout

_WIDTH, _BITS = 2048, 4


def has_pairs(layout: PackedLayout, rows: int, device: Device) -> bool:
    """Whether the product takes pairs of tiles: q, k and v, or the output projection, of a model 2,048 wide.

    It then has half as many blocks, which find room sooner beside attention and the products around it. That was
    measured with MiniCPM5-2B in 4 bits; wider and narrower models have other numbers of tiles.
    """
    is_of_stream = layout.product == "qkv" or (layout.product == "residual" and layout.out_features == _WIDTH)
    has_size = layout.in_features == _WIDTH and layout.bits == _BITS and layout.runs == RUNS
    return rows == 1 and has_size and is_of_stream and device.capability >= STARTS_EARLY

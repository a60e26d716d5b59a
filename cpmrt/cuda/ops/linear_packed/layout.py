"""Weights packed in 2, 4 or 8 bits as `linear_packed.cu` streams them: what a weight is on the device, and its layout.

`kernels_cu/include/packed_layout.cuh` describes the order of the bytes, which `repack.cu` writes on the device
from the files' formats.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TypedDict

from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.linear import PRODUCTS
from cpmrt.errors import UnsupportedModelError
from cpmrt.tensor_spec import Product, Quantization, TensorSpec

SLICE_COLUMNS = 128
TILE_ROWS = 16
LINE_BYTES = 128
RUNS = 8
SCALE_GROUPS = (16, 32, 64, 128)
ZERO_POINTS, MINIMUMS = 1, 2
"""Kinds of numbers beside scales: zero points, W = scale * (u - zero point), or minimums, W = scale * u - minimum."""
# From so many tiles a multiprocessor on, a warp takes whole rows. If eight warps shared a tile instead, a block would
# have too many rounds to keep all their sums, and each round would end with a barrier.
_WHOLE_ROW_TILES = 6


class LayoutSizes(TypedDict):
    """The values of `LayoutConstants`."""

    linear: int
    in_features: int
    weight_bits: int
    runs: int
    scale_group: int
    zeros: int
    head_dim: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConstants:
    """Compile-time constants of kernels that read or write the layout of one weight; `head_dim` is for qkv only."""

    linear: int
    in_features: int
    weight_bits: int
    runs: int
    scale_group: int
    zeros: int
    head_dim: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RepackConstants(LayoutConstants):
    """Compile-time constants of repack.cu: those of the layout, and the number of the file's format."""

    format: int


@dataclass(frozen=True)
class PackedLayout:
    """The order of the codes and scales of a weight [out_features, in_features], for one product and device.

    A unit has the codes and scales of 16 rows (a tile) and 128 columns (a slice), and beside each scale a number of the
    kind `zeros`: none (0; codes are symmetric around the middle of their range), ZERO_POINTS (in 4 bits only) or
    MINIMUMS (in 4 or 8 bits). K is cut into `runs` parts. `scale_group`: columns that share a scale in the packed form
    (the scales of a file's larger groups are repeated). `head_dim` is that of a "qkv" product.
    """

    product: Product
    out_features: int
    in_features: int
    runs: int
    scale_group: int
    zeros: int
    head_dim: int = 0
    bits: int = 4

    @property
    def num_tiles(self) -> int:
        return ceil(self.out_features / TILE_ROWS)

    @property
    def num_slices(self) -> int:
        return self.in_features // SLICE_COLUMNS

    @property
    def run_slices(self) -> int:
        return ceil(self.num_slices / self.runs)

    @property
    def code_bytes(self) -> int:
        """Bytes of a unit's codes."""
        return TILE_ROWS * SLICE_COLUMNS * self.bits // 8

    @property
    def unit_bytes(self) -> int:
        return self.code_bytes + SLICE_COLUMNS // self.scale_group * (64 if self.zeros else 32)

    @property
    def run_bytes(self) -> int:
        return whole_lines(self.run_slices * self.unit_bytes)

    @property
    def tile_bytes(self) -> int:
        filled = ceil(self.num_slices / self.run_slices)
        rest = self.num_slices - (filled - 1) * self.run_slices
        return (filled - 1) * self.run_bytes + whole_lines(rest * self.unit_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed matrix, scales and zero points included."""
        return self.num_tiles * self.tile_bytes

    @property
    def sizes(self) -> LayoutSizes:
        """The compile-time constants that packed_layout.cuh and packed_tiles.cuh ask for."""
        return {
            "linear": PRODUCTS[self.product], "in_features": self.in_features, "weight_bits": self.bits,
            "runs": self.runs, "scale_group": self.scale_group, "zeros": self.zeros, "head_dim": self.head_dim or None,
        }  # fmt: skip

    def repack_constants(self, format: int = 0) -> RepackConstants:
        """Return the constants of the kernels that write the layout from a file's format, or read it back."""
        return RepackConstants(**self.sizes, format=format)


@dataclass(frozen=True, eq=False, slots=True)
class PackedWeight:
    """A matrix [N, K] on the device: bytes in its layout, codes, scales and zero points together.

    Packed column k is column `perm[k]` of the matrix (int32 [K]; None: column k itself).
    """

    data: DeviceArray
    perm: DeviceArray | None
    layout: PackedLayout

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self.layout.out_features, self.layout.in_features

    def halves(self) -> tuple[PackedWeight, PackedWeight]:
        """Return the upper and the lower half of the rows, which are whole tiles."""
        half = replace(self.layout, out_features=self.layout.out_features // 2)
        parts = self.data[: half.num_bytes], self.data[half.num_bytes :]
        upper, lower = (PackedWeight(part, self.perm, half) for part in parts)
        return upper, lower


Weight = DeviceArray | PackedWeight
"""A matrix on the device, in 16 bits or packed."""


def data_of(weight: Weight) -> DeviceArray:
    """Return the array of a weight that kernels read."""
    return weight.data if isinstance(weight, PackedWeight) else weight


def packed_layout(spec: TensorSpec, device: Device) -> PackedLayout:
    """Return the layout of a weight with a `quant`. Raises UnsupportedModelError for what the kernels do not take."""
    assert spec.quant is not None and spec.product is not None, spec.name
    quant, product, (out_features, in_features) = spec.quant, spec.product, spec.shape
    bits, zeros = width_of(quant)
    if in_features % SLICE_COLUMNS:
        raise UnsupportedModelError(
            f"a {quant.bits}-bit {product} weight has a number of columns that the kernels do not take",
            expected=f"a multiple of {SLICE_COLUMNS}", actual=str(in_features), fix="use the unquantised checkpoint",
        )  # fmt: skip
    if quant.group_size not in SCALE_GROUPS and (quant.group_size < 1 or quant.group_size % SLICE_COLUMNS):
        raise UnsupportedModelError(
            f"a {quant.bits}-bit {product} weight has a group size that the kernels do not take",
            expected="16, 32, 64, 128 or -1", actual=str(quant.group_size),
            fix="use a checkpoint with another group size",
        )  # fmt: skip
    whole_rows = product in ("gate_up", "head") and ceil(out_features / TILE_ROWS) >= _WHOLE_ROW_TILES * device.num_sms
    # Runs may be shared among blocks, which wait for each other's sums and so must all be on the device at once.
    runs = 1 if whole_rows or device.num_sms < RUNS else RUNS
    return PackedLayout(
        product, out_features, in_features, runs, min(quant.group_size, SLICE_COLUMNS), zeros, spec.head_dim, bits,
    )  # fmt: skip


def width_of(quant: Quantization) -> tuple[int, int]:
    """Return the bits of packed codes, and the kind of number beside their scales (`PackedLayout.zeros`).

    Blocks of GGUF files keep their codes: those of 3 bits in 4 bits, of 5 and 6 in 8, and of 2 in 4 unless ternary.
    """
    if not quant.in_blocks:
        return quant.bits, 0 if quant.symmetric else ZERO_POINTS
    smallest = 2 if quant.symmetric and quant.group_size % 32 == 0 else 4
    bits = next(bits for bits in (2, 4, 8) if bits >= max(quant.bits, smallest))
    return bits, 0 if quant.symmetric else MINIMUMS


def whole_lines(num_bytes: int) -> int:
    """Return the bytes rounded up to lines of 128."""
    return ceil(num_bytes / LINE_BYTES) * LINE_BYTES

"""Products of a step's rows (1 to 64) with weights in 16 bits: how the kernels of `linear.cu` are built and launched.

`cluster` fixes the order of a sum, so it depends on the weight's shape and the device alone (row invariance); the other
constants may depend on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray, KernelArgument
from cpmrt.cuda.driver.device import Device
from cpmrt.executor import MAX_ROWS
from cpmrt.tensor_spec import Product

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")
PRODUCTS: dict[Product, int] = {"qkv": 0, "residual": 1, "gate_up": 2, "head": 3}
"""The number (LINEAR) of a product in the kernels' sources."""
OPS: dict[Product, str] = {"qkv": "qkv", "residual": "project_residual", "gate_up": "gate_up", "head": "lm_head"}
BLOCK_THREADS = 256
ROW_BUCKETS = (8, 16, 32, 64)
_WARPS = 8
_UNIT_COLUMNS = 64
_CHUNK_BYTES = 2048
# Bytes of a unit of one row, and of the norm weights for a unit; the row is kept whole in shared memory where both
# together take at most this share of it.
_ROW_UNIT_BYTES, _MOST_ROW_SHARE = 128, 0.5
STARTS_EARLY = 90
"""The compute capability from which on a kernel may begin before the one before it has ended, and so asks for weights
before x."""
FETCHING_CAPABILITY = 90
"""The compute capability from which on a kernel can ask for bytes to be brought to the L2."""
LARGE_SHARED_BYTES = 200_000
"""Bytes of shared memory a block from which on kernels use the sizes made for data-centre GPUs."""
# Up to so many rows only half of the second tile of tokens is stored, which leaves more shared memory to weights.
_HALF_TILE_ROWS = 12
_MAX_GROUP = {1: 5, 2: 5, 4: 5, 8: 2}
_SMALL_MAX_GROUP = {1: 4, 2: 4, 4: 3, 8: 1}
# Two blocks that share a tile exchange their sums, which costs about a microsecond: so they share one only if the
# busiest multiprocessor then reads less than this part of what it would read otherwise.
_CLUSTER_GAIN = 0.9
# Only where it was measured are all weights of one row's products asked for before the row.
_ROUND_CAPABILITY = 90
# In models up to this width the weights of all products of a layer have room in shared memory.
_SMALL_WIDTH = 1024
# The most chunks of weights that a warp keeps in registers, 16 registers of each lane for one.
_MOST_HELD = 2
# When gate_up of one row starts, attention still holds some multiprocessors. Two gate_up blocks may then share another
# one, if they fit there with this part of the weights that each streams.
_SHARING_STREAM = 0.75
# Multiprocessors that the attention of a small model's row has to itself, while blocks of gate_up and down ask for
# weights on the others.
_ATTENDING = 16
# Two tiles of an output projection share a block if their weights take no more than this part of a multiprocessor's
# shared memory.
_JOINED_SHARE = 1 / 3
# From so many tiles of tokens on, and so many weight tiles a multiprocessor, it pays to read x once for eight times as
# many weight tiles, at the price of a second set of sums.
_ROW_SPLIT_TOKEN_TILES = 8
_ROW_SPLIT_TILES_PER_SM = 12


@dataclass(frozen=True, slots=True)
class LinearConstants:
    """Compile-time constants of linear.cu; `smem_bytes` is the dynamic shared memory of a block."""

    linear: int
    in_features: int
    token_tiles: int
    half_tile: bool
    group: int
    cluster: int
    split_warps: int
    norm: bool
    smem_bytes: int
    head_dim: int | None = None
    fatrelu: int | None = None
    row_pitch: int | None = None
    one_row: bool | None = None
    rows_first: bool | None = None
    held_chunks: int | None = None


LINEAR = {
    product: KernelSpec(f"linear_{product}", "linear/linear.cu", op, LinearConstants, hot=True)
    for product, op in OPS.items()
}


class QkvRest(NamedTuple):
    """The last arguments of a "qkv" product: the table of RoPE, the rows' places, and sizes.

    With pages `rope` [2, num_positions, head_dim / 2], `positions`, `slots` and `block_tables` must not be None.
    """

    rope: DeviceArray | None
    positions: DeviceArray | None
    locations: DeviceArray | None
    slots: DeviceArray | None
    block_tables: DeviceArray | None
    num_rows: np.int32
    num_heads: np.int32
    num_kv_heads: np.int32
    pages_per_sequence: np.int32
    num_positions: np.int32
    eps: np.float32


class ResidualRest(NamedTuple):
    """The last arguments of a "residual" product: its rows, their columns, and the factor of what is added to them."""

    num_rows: np.int32
    width: np.int32
    scale: np.float32


@dataclass(frozen=True, slots=True)
class StepProduct:
    """The operands of a product of a step's rows as the kernel takes them, except for the weight, 16-bit or packed.

    `x` [T, K], or wider, are the rows, of which the first K columns enter the product, normalised unless `norm` is None
    ("residual" products have none). `outputs` are the kernel's first arguments, `rest` its last, of a "qkv" product a
    QkvRest, of a "residual" product a ResidualRest. Only these two kinds have a `bias`. `head_dim` is that of a "qkv"
    product, `fatrelu` the activation of a "gate_up" product, as in `config.layers.GatedMlp`. With `starts_next` a "qkv"
    product may start the next kernel before its own wait: that one reads early only what is older than these layers.
    """

    kind: Product
    outputs: tuple[KernelArgument, ...]
    x: DeviceArray
    norm: DeviceArray | None
    eps: float
    rest: tuple[KernelArgument, ...]
    bias: DeviceArray | None = None
    head_dim: int = 0
    fatrelu: float | None = None
    starts_next: bool = False

    def row_pitch(self, in_features: int) -> int | None:
        """Return the columns of the rows if they are wider than the product, as a compile-time constant; else None."""
        return None if self.x.shape[1] == in_features else self.x.shape[1]

    def built(self, constants: C) -> C:
        """Return the constants of a plan with this product's activation."""
        return constants if self.fatrelu is None else replace(constants, fatrelu=float_bits(self.fatrelu))

    def arguments(
        self, x: KernelArgument, weight: tuple[KernelArgument, ...], more_outputs: tuple[KernelArgument, ...] = ()
    ) -> tuple[KernelArgument, ...]:
        """Return the kernel's arguments, with the rows and the weight in the form in which it reads them."""
        norm = () if self.kind == "residual" else (self.norm,)
        bias = (self.bias,) if self.kind in ("qkv", "residual") else ()
        return (*self.outputs, *more_outputs, x, *norm, *weight, *bias, *self.rest)


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """The plan of a product: its compile-time constants, and `grid` blocks of `BLOCK_THREADS` threads."""

    constants: LinearConstants
    grid: int


def launch_linear(
    launch: Launcher, product: StepProduct, weight: DeviceArray, device: Device,
    *, prefers_shared: bool = False, comes_ahead: bool = False,
) -> None:  # fmt: skip
    """Launch the product with a weight [N, K] in 16 bits.

    `prefers_shared`: as in `PackedProducts`. With `comes_ahead` (`Handoff`) the attention of one row has started its
    next kernel at once, and so does this product: then all kernels of a layer come a layer ahead, if they find room.
    """
    x, has_norm = product.x, product.norm is not None
    plan = plan_linear(
        product.kind, weight.shape, len(x), device, has_norm=has_norm, head_dim=product.head_dim,
        comes_ahead=comes_ahead,
    )  # fmt: skip
    pitch = product.row_pitch(weight.shape[1])
    arguments, constants = product.arguments(x, (weight,)), product.built(replace(plan.constants, row_pitch=pitch))
    launch(
        LINEAR[product.kind], constants, plan.grid, BLOCK_THREADS, *arguments, smem=constants.smem_bytes,
        prefers_shared=prefers_shared,
    )  # fmt: skip


def float_bits(value: float) -> int:
    """Return the bits of a float32, as a compile-time constant holds it."""
    return int(np.float32(value).view(np.int32))


def row_bucket(num_rows: int, buckets: tuple[int, ...]) -> int:
    """Return the rows of the build, one of `buckets`, that takes `num_rows` rows (1 to 64). Raises ValueError."""
    if not 1 <= num_rows <= MAX_ROWS:
        raise ValueError(f"num_rows must be 1 to {MAX_ROWS}, got {num_rows}")
    return next(bucket for bucket in buckets if bucket >= num_rows)


def plan_linear(
    product: Product, shape: tuple[int, ...], num_rows: int, device: Device,
    *, has_norm: bool = True, head_dim: int = 0, comes_ahead: bool = False,
) -> LinearPlan:  # fmt: skip
    """Plan one product with a weight of this shape, [N, K] (gate_up: both halves together).

    `has_norm` False: rows enter the product as they are, as those of "residual" always do. `comes_ahead`: as in
    `launch_linear`.
    """
    (out_features, in_features), tiles = shape, row_bucket(num_rows, ROW_BUCKETS) // 8
    half_tile = tiles == 2 and num_rows <= _HALF_TILE_ROWS
    weight_tiles, units = ceil(out_features / 16), ceil(in_features / _UNIT_COLUMNS)
    cluster = _cluster(weight_tiles, device)
    num_clusters, is_large = device.num_sms // cluster, device.shared_bytes_per_block >= LARGE_SHARED_BYTES
    can_split = product in ("gate_up", "head") and cluster == 1 and units % _WARPS == 0 and in_features >= 2048
    many = tiles >= _ROW_SPLIT_TOKEN_TILES and weight_tiles >= _ROW_SPLIT_TILES_PER_SM * device.num_sms
    row_warps = _WARPS if can_split and many and is_large else 1

    def rounds(group: int) -> int:
        return ceil(ceil(weight_tiles / (group * row_warps)) / num_clusters)

    max_group = (_MAX_GROUP if is_large else _SMALL_MAX_GROUP)[tiles]
    # Rows that the busiest block reads: of the weight, and of x once a round.
    group = min(range(max_group, 0, -1), key=lambda group: rounds(group) * (16 * group * row_warps + 8 * tiles))
    if comes_ahead and product == "residual" and _joins_tiles(weight_tiles, in_features, device):
        group = 2
    norm, row_bytes = has_norm and product != "residual", _own_units(in_features, cluster) * _WARPS * _ROW_UNIT_BYTES
    one_row = num_rows == 1 and 2 * row_bytes <= device.shared_bytes_per_block * _MOST_ROW_SHARE
    constants = LinearConstants(
        linear=PRODUCTS[product], in_features=in_features, token_tiles=tiles, half_tile=half_tile, group=group,
        cluster=cluster, split_warps=_WARPS // row_warps, norm=norm, smem_bytes=0, head_dim=head_dim or None,
        one_row=one_row or None, rows_first=device.capability < STARTS_EARLY or None,
    )  # fmt: skip
    grid = cluster * min(ceil(weight_tiles / (group * row_warps)), num_clusters)
    is_small = (out_features if product == "residual" else in_features) <= _SMALL_WIDTH
    memory = None
    if one_row and rounds(group) == 1 and (comes_ahead or not is_small):
        memory = _memory_of_round(constants, grid, device, is_small=is_small)
    smem_bytes, held_chunks = memory or (_streamed_bytes(constants, rounds(group), device), None)
    return LinearPlan(replace(constants, smem_bytes=smem_bytes, held_chunks=held_chunks), grid)


def _own_units(in_features: int, cluster: int) -> int:
    return ceil(ceil(in_features / _UNIT_COLUMNS) / (_WARPS * cluster))


def _joins_tiles(weight_tiles: int, in_features: int, device: Device) -> bool:
    """Whether a block of one row takes two tiles of a "residual" product instead of one.

    So do those of a small model's output projection: blocks of gate_up and down then find more multiprocessors with
    room for both.
    """
    is_few = device.num_sms // 4 < weight_tiles <= device.num_sms // 2
    two_tiles = 2 * 16 * 2 * in_features
    return is_few and two_tiles <= device.shared_bytes_per_block * _JOINED_SHARE


def _memory_of_round(
    constants: LinearConstants, grid: int, device: Device, *, is_small: bool
) -> tuple[int, int] | None:
    """Return the bytes of shared memory of a block whose weights are all asked for before its row, and its
    `held_chunks`; None if they have no room, or on a device where that was not measured.

    Blocks of a small model's gate_up and down have room beside each other where both hold part of their weights in
    registers. Where there is a multiprocessor without attention for each block, they ask for so much shared memory that
    no two share one.
    """
    if device.capability != _ROUND_CAPABILITY:
        return None
    fixed, stage, whole = _fixed_bytes(constants), _WARPS * _CHUNK_BYTES, _whole_bytes(constants, 1)
    chunks = constants.group * _own_units(constants.in_features, constants.cluster)
    slots = (device.lone_block_bytes - 1 - fixed) // stage
    if is_small and 0 < chunks - slots <= _MOST_HELD:
        is_alone = grid <= device.num_sms - _ATTENDING
        return device.lone_block_bytes if is_alone else fixed + slots * stage, chunks - slots
    return (whole, 0) if whole <= device.shared_bytes_per_block else None


def _streamed_bytes(constants: LinearConstants, rounds: int, device: Device) -> int:
    """Return the bytes of shared memory of a block that takes its tiles in `rounds` rounds, streamed through a ring."""
    fixed, whole = _fixed_bytes(constants), _whole_bytes(constants, rounds)
    if constants.one_row and constants.linear == PRODUCTS["gate_up"]:
        stage = _WARPS * _CHUNK_BYTES
        shared = fixed + int((whole - fixed) * _SHARING_STREAM) // stage * stage
        if shared < device.lone_block_bytes <= whole:
            return shared
    # A block whose weights all fit asks for no more, so that the next kernels' blocks fit beside it and prefetch.
    return min(device.shared_bytes_per_block, whole)


def _fixed_bytes(own: LinearConstants) -> int:
    """Return the bytes of shared memory of a block beside its weights."""
    tiles, units = own.token_tiles, _WARPS * _own_units(own.in_features, own.cluster)
    activations = units * (_ROW_UNIT_BYTES if own.one_row else tiles * 1024 - own.half_tile * 512)
    sums = _WARPS * own.group * (64 * own.cluster if own.one_row else 512 + 256 * tiles)
    return activations + sums + own.norm * units * _ROW_UNIT_BYTES + _WARPS * own.cluster * tiles * 32 + tiles * 128


def _whole_bytes(own: LinearConstants, rounds: int) -> int:
    """Return the bytes of shared memory of a block that has room for all weights of its `rounds` rounds."""
    units, row_warps = _WARPS * _own_units(own.in_features, own.cluster), _WARPS // own.split_warps
    return _fixed_bytes(own) + rounds * own.group * row_warps * units * _CHUNK_BYTES


def _cluster(weight_tiles: int, device: Device) -> int:
    """Return how many blocks share a tile: 2 where halves of tiles spread more evenly over the multiprocessors."""

    def busiest(cluster: int) -> float:
        return ceil(weight_tiles / (device.num_sms // cluster)) / cluster

    if device.capability < 90 or weight_tiles <= device.num_sms:
        return 1
    return 2 if busiest(2) < _CLUSTER_GAIN * busiest(1) else 1

"""The product qkv and the attention of one row in one launch, also with the output projection, for rows where starting
and ending kernels takes most of the time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray, KernelArgument
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.attention import HeadConstants, Operands
from cpmrt.cuda.ops.attention.decode import AttentionScratch, DecodePlan
from cpmrt.cuda.ops.linear import plan_linear
from cpmrt.cuda.ops.linear_packed.constants import LinearPackedConstants
from cpmrt.cuda.ops.linear_packed.division import has_pairs
from cpmrt.cuda.ops.linear_packed.ffn_row import HeldFfn
from cpmrt.cuda.ops.linear_packed.layout import TILE_ROWS, PackedLayout, PackedWeight, Weight, data_of, whole_lines
from cpmrt.cuda.ops.linear_packed.plan import plan_kv_heads
from cpmrt.ops import Fp8Pages, Handoff, KVPages, QkvWeights, Rows

_CAPABILITY, _BITS, _MOST_HEADS, _THREADS = 90, 4, 8, 256
_HEAD_DIM = 64
"""The head_dim of the models that gain by one launch. Heads of 96 spill registers."""
_CLUSTER, _MOST_BLOCKS = 8, 16
"""Blocks that share the rows of a KV head, which is also how many warps share a tile, each with a run of K; the most
blocks of a cluster."""
# The largest share of a multiprocessor's shared memory for a block. In 4 bits blocks find room beside those of a
# gate_up product, which take a little more than half of it; in 16 bits a block has it alone, but for static memory.
_MOST_SHARE, _MOST_SHARE_16 = 0.48, 0.99
# The most tiles of the output projection of a block: a lane then finishes two columns of x at most.
_MOST_ROUNDS = 4
_UNIT_COLUMNS, _UNIT_BYTES = 64, 2048  # a unit of a tile with weights in 16 bits
_SQUARE_BYTES, _ROUND_BYTES = 128, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class QkvAttentionConstants(LinearPackedConstants):
    """Compile-time constants of qkv_attention.cu: the product's, query heads of a KV head (`group`), tiles of a block
    (`head_rounds`); with the output projection, its tiles of a block (`output_rounds`) and the number of KV heads."""

    head_dim: int
    group: int
    head_rounds: int
    output_rounds: int = 0
    kv_heads: int | None = None


@dataclass(frozen=True, kw_only=True)
class LinearQkvAttentionConstants(HeadConstants):
    """Compile-time constants of linear_qkv_attention.cu, which explains them."""

    in_features: int
    head_rounds: int
    stages: int
    smem_bytes: int
    portable: bool = False


QKV_ATTENTION = KernelSpec(
    "qkv_attention", "attention/qkv_attention.cu", "decode_attention", QkvAttentionConstants, hot=True, arch="sm_90",
    has_wide_clusters=lambda sizes: sizes.get("KV_HEADS", 1) > 1,
)  # fmt: skip
LINEAR_QKV_ATTENTION = KernelSpec(
    "linear_qkv_attention", "attention/linear_qkv_attention.cu", "decode_attention", LinearQkvAttentionConstants,
    hot=True, arch="sm_90",
)  # fmt: skip


@dataclass(frozen=True)
class QkvAttentionPlan:
    """One launch of `kernel`, with a cluster of eight blocks for each KV head."""

    kernel: KernelSpec
    constants: QkvAttentionConstants | LinearQkvAttentionConstants
    grid: int
    shared_bytes: int
    num_splits: int

    @classmethod
    def of(
        cls, shape: tuple[int, ...], layout: PackedLayout | None, decode: DecodePlan, device: Device
    ) -> QkvAttentionPlan | None:
        """Plan for a weight of this shape, in 16 bits without a layout; None where it stays two launches."""
        own, num_kv_heads = decode.constants, decode.units
        rows = num_kv_heads * (own.group + 2) * own.head_dim
        fits = device.capability == _CAPABILITY and decode.cluster == _CLUSTER
        fits = fits and own.head_dim == _HEAD_DIM and own.group <= _MOST_HEADS
        rounds = -(-rows // TILE_ROWS // (num_kv_heads * _CLUSTER))
        if not fits or own.fp8 or shape[0] != rows or rounds > _THREADS // 32:
            return None
        constants: QkvAttentionConstants | LinearQkvAttentionConstants | None
        if layout is None:
            finds_room = num_kv_heads <= device.whole_clusters  # each block has a multiprocessor to itself
            constants = _plain(shape, decode, rounds, device) if finds_room else None
            kernel, share = LINEAR_QKV_ATTENTION, _MOST_SHARE_16
        else:
            kernel, constants, share = QKV_ATTENTION, _packed(layout, decode, rounds, device), _MOST_SHARE
        shared_bytes = decode.row_bytes + (0 if constants is None else constants.smem_bytes)
        if constants is None or shared_bytes > device.shared_bytes_per_block * share:
            return None
        return cls(kernel, constants, num_kv_heads * _CLUSTER, shared_bytes, decode.num_splits)

    def projecting(self, weight: PackedLayout, device: Device) -> QkvAttentionPlan | None:
        """Return the plan with the output projection in the same launch; None where that stays a launch of its own.

        A cluster then has the blocks of all KV heads, which send each other the row that attention makes. The weight is
        streamed as that of q, k and v is, so it has the same columns, codes and groups.
        """
        own, most = self.constants, _MOST_BLOCKS if device.has_wide_clusters else _CLUSTER
        if not isinstance(own, QkvAttentionConstants) or self.grid > most:
            return None
        kv_heads = self.grid // _CLUSTER
        rounds, rest = divmod(weight.num_tiles, self.grid)
        has_all_tiles = own.head_rounds * _CLUSTER * TILE_ROWS == (own.group + 2) * own.head_dim
        has_all_columns = weight.in_features == own.in_features == kv_heads * own.group * own.head_dim
        streamed = own.weight_bits, own.scale_group, own.zeros, own.runs
        is_alike = has_all_columns and streamed == (weight.bits, weight.scale_group, weight.zeros, weight.runs)
        shared_bytes = self.shared_bytes + 2 * weight.in_features * 2  # attention's row and x
        fits = shared_bytes <= device.shared_bytes_per_block * _MOST_SHARE
        has_places = not rest and rounds <= min(own.head_rounds, _MOST_ROUNDS)
        if weight.run_slices > 1 or not (has_all_tiles and is_alike and has_places and fits):
            return None
        constants = replace(own, output_rounds=rounds, kv_heads=kv_heads)
        return replace(self, constants=constants, shared_bytes=shared_bytes)


def _packed(layout: PackedLayout, decode: DecodePlan, rounds: int, device: Device) -> QkvAttentionConstants | None:
    product = plan_kv_heads(layout, decode.units, device) if layout.bits == _BITS else None
    if product is None:
        return None
    return product.constants.extended(
        QkvAttentionConstants, stages=decode.constants.stages, smem_bytes=whole_lines(product.shared_bytes),
        group=decode.constants.group, head_rounds=rounds,
    )  # fmt: skip


def _plain(
    shape: tuple[int, ...], decode: DecodePlan, rounds: int, device: Device
) -> LinearQkvAttentionConstants | None:
    """Return the constants for a weight in 16 bits; None unless the product alone sums in runs of eight warps of one
    block, as this kernel must have the same bits."""
    own, units = decode.constants, shape[1] // _UNIT_COLUMNS
    alone = plan_linear("qkv", shape, 1, device, head_dim=own.head_dim)
    if shape[1] % (_UNIT_COLUMNS * _CLUSTER) or alone.constants.cluster > 1:
        return None
    received = 2 * own.head_dim * 2 + rounds * _ROUND_BYTES
    smem_bytes = whole_lines(units * rounds * _UNIT_BYTES + _SQUARE_BYTES + received)
    return LinearQkvAttentionConstants(
        own.head_dim, own.group, in_features=shape[1], head_rounds=rounds, stages=own.stages, smem_bytes=smem_bytes
    )


# What qkv_attention.cu takes for the output projection, where that is a launch of its own.
_NO_OUTPUT = None, np.float32(0), None, np.float32(0)
_plan = lru_cache(maxsize=64)(QkvAttentionPlan.of)
_projecting = lru_cache(maxsize=64)(QkvAttentionPlan.projecting)


def joined_plan(decode: DecodePlan, device: Device, kv: KVPages, weights: QkvWeights) -> QkvAttentionPlan | None:
    """Plan the op `qkv` and the attention of one short row with RoPE as one launch, for these weights and pages; None
    where they stay two launches."""
    weight: Weight = weights.weight
    if weights.bias is not None or not is_followed_by_attention(kv, weights):
        return None
    if not isinstance(weight, PackedWeight):
        return _plan(weight.shape, None, decode, device)
    return None if weight.perm is not None else _plan(weight.shape, weight.layout, decode, device)


def is_followed_by_attention(kv: KVPages, weights: QkvWeights) -> bool:
    """Whether attention follows the product of q, k and v directly: no norms of heads, pages in fp8 or compressed keys
    need a kernel between them."""
    needs_more = any(extra is not None for extra in (weights.q_norm, weights.k_norm, kv.compressed))
    return not needs_more and not isinstance(kv.k, Fp8Pages)


def has_short_row(decode: DecodePlan, device: Device, kv: KVPages, weights: QkvWeights) -> bool:
    """Whether the op `qkv` and the attention of one short row with RoPE have launches of their own."""
    weight: Weight = weights.weight
    takes_pairs = isinstance(weight, PackedWeight) and has_pairs(weight.layout, 1, device)
    starts_attention = takes_pairs and is_followed_by_attention(kv, weights)
    return starts_attention or joined_plan(decode, device, kv, weights) is not None


def is_lone_row(x: DeviceArray, rows: Rows) -> bool:
    """Whether this is the row of a decode step of one sequence with few keys.

    Such a step launches `embed`, which starts the next kernel behind its own wait, and then the layers. So what `embed`
    finds written, the row's place and all older keys, a kernel of any layer may read before its wait.
    """
    is_plain = rows.locations is None and rows.tree_masks is None and rows.reach is None
    return len(x) == 1 and rows.kind.length == "short" and is_plain


@dataclass(frozen=True, eq=False, slots=True)
class HeldQkv:
    """The op `qkv` of one row, left to the kernel of its attention: its plan and the operands that the kernel takes."""

    plan: QkvAttentionPlan
    x: DeviceArray
    norm: DeviceArray
    weight: DeviceArray
    rope: DeviceArray
    eps: float

    @property
    def starts_next(self) -> bool:
        """Whether the kernel starts the next one at once."""
        return self.plan.kernel is LINEAR_QKV_ATTENTION


def hold_qkv(
    decode: DecodePlan, device: Device, kv: KVPages, x: DeviceArray, weights: QkvWeights, rope: DeviceArray | None,
    rows: Rows, eps: float,
) -> HeldQkv | None:  # fmt: skip
    """Return the op `qkv` held for the launch of its attention; None where it has to be launched alone."""
    weight: Weight = weights.weight
    if not is_lone_row(x, rows) or rope is None or x.shape[1] != weight.shape[1]:
        return None
    plan, norm = joined_plan(decode, device, kv, weights), weights.norm
    return None if plan is None or norm is None else HeldQkv(plan, x, norm, data_of(weight), rope, eps)


@dataclass(frozen=True, eq=False, slots=True)
class HeldRowAttention:
    """The op `qkv` of one row and its attention, left to the launch of the output projection."""

    qkv: HeldQkv
    scratch: AttentionScratch
    given: Operands

    def launch(self, launch: Launcher) -> Handoff:
        """Launch both together, without the output projection; return the handoff for that."""
        plan = self.qkv.plan
        self._launch(launch, plan, plan.shared_bytes, *(_NO_OUTPUT if plan.kernel is QKV_ATTENTION else ()))
        return Handoff(comes_ahead=self.qkv.starts_next)

    def launch_with_output(
        self, launch: Launcher, device: Device, x: DeviceArray, weight: Weight, bias: DeviceArray | None, scale: float,
        ffn: HeldFfn,
    ) -> bool:  # fmt: skip
        """Launch all three together, where one launch can do that, and return whether it did.

        An mlp before them that is held back is launched first, and they add its sums to x.
        """
        if not isinstance(weight, PackedWeight) or weight.perm is not None or bias is not None or x is not self.qkv.x:
            return False
        plan = _projecting(self.qkv.plan, weight.layout, device)
        if plan is None:
            return False
        sums, sums_scale = ffn.launch_sums(x)
        # Behind an mlp's single launch this one would begin beside the one of the layer before, while that attends, and
        # take time from it; so it asks for so much shared memory that they do not share a multiprocessor.
        alone = 0 if sums is None else device.lone_block_bytes
        output = weight.data, np.float32(scale), sums, sums_scale
        self._launch(launch, plan, max(plan.shared_bytes, alone), *output)
        return True

    def _launch(self, launch: Launcher, plan: QkvAttentionPlan, shared_bytes: int, *output: KernelArgument) -> None:
        held, given, scratch = self.qkv, self.given, self.scratch
        kv, rows = given.kv, given.rows
        sizes = map(np.int32, (plan.num_splits, rows.block_tables.shape[1], held.rope.shape[1]))
        launch(
            plan.kernel, plan.constants, plan.grid, _THREADS,
            given.out, scratch.partials, kv.k, kv.v, held.x, held.norm, held.weight, held.rope, rows.positions,
            rows.slots, rows.block_tables, *sizes, np.float32(held.eps), np.float32(given.scale), *output,
            smem=shared_bytes, prefers_shared=True,
        )  # fmt: skip

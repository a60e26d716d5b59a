"""The ops that multiply by a weight: q, k and v, the projections into the residual stream, gate and up, the head.

In a step of at most 64 rows each op is one kernel, which streams the weight once. The rows of a prefill chunk, however
few, take a dense product and a small kernel after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cpmrt.config import ModelConfig
from cpmrt.config.layers import ExpertsMlp, GatedMlp, GroupedAttention
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray, KernelArgument
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.attention.decode import DecodePlan
from cpmrt.cuda.ops.attention.qkv import HeldRowAttention, hold_qkv, is_followed_by_attention, is_lone_row
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.ops.kv import PageConstants, codes_of, compress_keys, nodes_of, scales_of
from cpmrt.cuda.ops.linear import QkvRest, ResidualRest, StepProduct, float_bits, launch_linear
from cpmrt.cuda.ops.linear_packed.layout import PackedWeight, Weight
from cpmrt.cuda.ops.linear_packed.products import PackedProducts, packed_workspace
from cpmrt.cuda.ops.rows import BLOCK, VECTOR, RowConstants, rms_norm
from cpmrt.models.layers import GATE_UP, QKV
from cpmrt.ops import NOTHING, Fp8Pages, Handoff, KVPages, QkvWeights, Rows, check_shapes
from cpmrt.tensor_spec import PLAIN_HEAD_DIM, BufferSpec, TensorSpec


@dataclass(frozen=True, slots=True)
class ActivationConstants:
    """Compile-time constants of activation.cu: the columns of gate or up, and the bits of a FATReLU's threshold."""

    intermediate: int
    fatrelu: int | None = None


@dataclass(frozen=True)
class RopeConstants(PageConstants):
    """Compile-time constants of rope_append.cu; `no_rope`: heads are stored without rotation; `tree`: rows are nodes of
    a draft tree, stored beside fp8 pages."""

    no_rope: bool | None = None
    tree: bool | None = None


ROPE_APPEND = KernelSpec("rope_append", "attention/rope_append.cu", "qkv", RopeConstants, hot=True)
SILU_MUL = KernelSpec("silu_mul", "rows/activation.cu", "gate_up", ActivationConstants, hot=True)
RESIDUAL_ADD = KernelSpec("residual_add", "rows/residual.cu", "project_residual", RowConstants, hot=True)


def product_workspace(
    specs: Sequence[TensorSpec], config: ModelConfig, max_rows: int, device: Device
) -> Iterator[BufferSpec]:
    """Yield the buffers of the products of a step of at most `max_rows` rows with the weights `specs`."""
    yield BufferSpec("normed", (max_rows, config.hidden_size), QKV, GATE_UP)
    attention = config.of_kind(GroupedAttention)
    if attention is not None:
        yield BufferSpec("qkv", (max_rows, attention.q_size + 2 * attention.kv_size), QKV, QKV)
    if isinstance(config.mlp, GatedMlp):
        yield BufferSpec("gate_up", (max_rows, 2 * config.mlp.intermediate_size), GATE_UP, GATE_UP)
    if isinstance(config.mlp, ExpertsMlp):
        from cpmrt.cuda.ops.experts import expert_workspace  # few models have experts

        yield from expert_workspace(specs, config.mlp, config.hidden_size, max_rows)
    yield from packed_workspace(specs, config, max_rows, device)


class Products:
    """The ops of `ops.protocol.Ops` that multiply by a weight, for one model.

    `arrays` holds the buffers of `product_workspace` and `packed_tables` by name, and `chunk` (slot, start, count) of a
    prefill step: its products may leave out rows behind the first `count`. `attention`: the plan of grouped attention,
    if the layers have it. `prefers_shared`: as in `PackedProducts`.
    """

    def __init__(
        self, device: Device, launcher: Launcher, gemm: Gemm, arrays: Mapping[str, DeviceArray],
        attention: DecodePlan | None = None, *, prefers_shared: bool = False,
    ):  # fmt: skip
        self._attention = attention
        self._device, self._launch, self._gemm, self._prefers_shared = device, launcher, gemm, prefers_shared
        self._normed: DeviceArray = arrays["normed"]
        self._chunk: DeviceArray | None = arrays.get("chunk")
        self._qkv: DeviceArray | None = arrays.get("qkv")
        self._gate_up: DeviceArray | None = arrays.get("gate_up")
        self._packed = PackedProducts(launcher, gemm, arrays, device, prefers_shared=prefers_shared)
        self.held_layers = self._packed.held_layers

    def qkv(
        self,
        q: DeviceArray,
        kv: KVPages,
        x: DeviceArray,
        weights: QkvWeights,
        rope: DeviceArray | None,
        rows: Rows,
        eps: float,
        q_nope: DeviceArray | None = None,
        *,
        is_attended: bool = False,
    ) -> Handoff:
        """Launch the op `qkv`, or hold it for the launch of its attention, which gets it in the handoff."""
        nope = kv.compressed.nope if kv.compressed else None
        check_shapes(
            "qkv", q=q, k=kv.k, v=kv.v, x=x, norm=weights.norm, weight=weights.weight, bias=weights.bias,
            q_norm=weights.q_norm, k_norm=weights.k_norm, rope=rope, positions=rows.positions, locations=rows.locations,
            slots=rows.slots, block_tables=rows.block_tables, q_nope=q_nope, nope=nope,
        )  # fmt: skip
        if is_attended and self._attention is not None and q_nope is None and not rows.is_prefill:
            held = hold_qkv(self._attention, self._device, kv, x, weights, rope, rows, eps)
            if held is not None:
                return Handoff(held)
        rest, head_dim = _qkv_rest(q, kv, rope, rows, eps), kv.k.shape[3]

        def project(*outputs: KernelArgument, starts_next: bool = False) -> Handoff:
            product = StepProduct(
                "qkv", outputs, x, weights.norm, eps, rest, weights.bias, head_dim, starts_next=starts_next
            )  # fmt: skip
            return self._step(product, weights.weight)

        assert self._qkv is not None, "planned without grouped attention"
        raw, left = self._qkv[: len(x)], NOTHING
        if rows.is_prefill:
            self._dense(raw, self._normalised(x, weights.norm, eps), weights.weight)
            self._append(q, kv, raw, weights.bias, weights, (q_nope, nope), rest, rows)
        elif rope is not None and weights.q_norm is None and q_nope is None and not isinstance(kv.k, Fp8Pages):
            starts_attention = is_attended and is_followed_by_attention(kv, weights) and is_lone_row(x, rows)
            left = project(q, kv.k, kv.v, starts_next=starts_attention)
        else:  # with null pages the kernel stores the projection as it is, the bias added
            left = project(raw, None, None)
            self._append(q, kv, raw, None, weights, (q_nope, nope), rest, rows)
        if kv.compressed is not None and rows.tree_masks is None and not rows.kind.is_inside:
            compress_keys(self._launch, kv, rows)
        return left

    def _append(
        self, q: DeviceArray, kv: KVPages, raw: DeviceArray, bias: DeviceArray | None, weights: QkvWeights,
        nope: tuple[DeviceArray | None, DeviceArray | None], rest: QkvRest, rows: Rows,
    ) -> None:  # fmt: skip
        """Store q, k and v of a projection [T, QKV] after bias, the norms of heads and RoPE.

        Keys and values go to the pages; those of a tree's nodes go beside fp8 pages.
        """
        head_dim, is_fp8 = kv.k.shape[3], isinstance(kv.k, Fp8Pages)
        keeps_nodes = is_fp8 and rows.tree_masks is not None
        constants = RopeConstants(head_dim, is_fp8, None if rest.rope is not None else True, keeps_nodes or None)
        targets: tuple[DeviceArray | None, ...] = codes_of(kv.k), codes_of(kv.v)
        scales = scales_of(kv.k, kv.v)
        if keeps_nodes:
            nodes = nodes_of(kv.k, kv.v)
            targets, scales = nodes[:2], (*scales, *nodes[2:], rows.tree_masks, rows.tree_base)
        grid = -(-len(raw) * (raw.shape[1] // head_dim) * (4 if head_dim == 64 else 8) // BLOCK)
        self._launch(
            ROPE_APPEND, constants, grid, BLOCK,
            q, *targets, *nope, raw, bias, weights.q_norm, weights.k_norm, *rest, *scales,
        )  # fmt: skip

    def project(
        self, out: DeviceArray, x: DeviceArray, norm: DeviceArray | None, weight: Weight, eps: float,
        *, is_prefill: bool = False,
    ) -> None:  # fmt: skip
        """Launch the op `project`: in a step the product `qkv`, which with null pages stores its rows as they are."""
        check_shapes("project", out=out, x=x, norm=norm, weight=weight)
        assert x.shape[1] == weight.shape[1] or not is_prefill and x.shape[1] > weight.shape[1]
        if is_prefill:
            self._dense(out, self._normalised(x, norm, eps), weight)
            return
        num_heads, none = np.int32(out.shape[1] // PLAIN_HEAD_DIM), np.int32(0)
        rest = QkvRest(None, None, None, None, None, np.int32(len(x)), num_heads, none, none, none, np.float32(eps))
        self._step(StepProduct("qkv", (out, None, None), x, norm, eps, rest, head_dim=PLAIN_HEAD_DIM), weight)

    def project_residual(
        self,
        x: DeviceArray,
        inner: DeviceArray,
        weight: Weight,
        bias: DeviceArray | None,
        scale: float,
        after: Handoff = NOTHING,
        *,
        ahead: Weight | None = None,
        is_prefill: bool = False,
    ) -> Handoff:
        """Launch the op `project_residual`."""
        check_shapes("project_residual", x=x, inner=inner, weight=weight, bias=bias)
        num_rows, factor = np.int32(len(x)), np.float32(scale)
        if isinstance(after.prepared, HeldRowAttention):
            held = after.prepared
            if held.launch_with_output(self._launch, self._device, x, weight, bias, scale, self._packed.held_ffn):
                return NOTHING
            after = held.launch(self._launch)
        if not is_prefill:
            rest = ResidualRest(num_rows, np.int32(x.shape[1]), factor)
            return self._step(StepProduct("residual", (x,), inner, None, 0.0, rest, bias), weight, after, ahead)
        if bias is None:
            self._dense(x, inner, weight, alpha=scale, beta=1.0)
        else:
            y = self._normed[: len(x)]
            self._dense(y, inner, weight)
            grid = -(-x.size // VECTOR // BLOCK)
            self._launch(RESIDUAL_ADD, RowConstants(x.shape[1]), grid, BLOCK, x, y, bias, num_rows, factor)
        return NOTHING

    def gate_up(
        self, out: DeviceArray, x: DeviceArray, norm: DeviceArray, weight: Weight, eps: float, after: Handoff = NOTHING,
        *, fatrelu: float | None = None, is_prefill: bool = False,
    ) -> Handoff:  # fmt: skip
        """Launch the op `gate_up`."""
        check_shapes("gate_up", out=out, x=x, norm=norm, weight=weight)
        num_rows, width = np.int32(len(x)), out.shape[1]
        if not is_prefill:
            rest = num_rows, np.int32(width), np.float32(eps)
            return self._step(StepProduct("gate_up", (out,), x, norm, eps, rest, fatrelu=fatrelu), weight, after)
        assert self._gate_up is not None, "planned without a gated mlp"
        both, normed = self._gate_up[: len(x)], self._normalised(x, norm, eps)
        if isinstance(weight, PackedWeight) and self._packed.gated_chunk(out, normed, weight, fatrelu):
            return NOTHING
        self._dense(both, normed, weight)
        constants = ActivationConstants(width, None if fatrelu is None else float_bits(fatrelu))
        self._launch(SILU_MUL, constants, -(-out.size // VECTOR // BLOCK), BLOCK, out, both, num_rows)
        return NOTHING

    def lm_head(
        self, logits: DeviceArray, x: DeviceArray, norm: DeviceArray | None, weight: Weight, eps: float, divisor: float
    ) -> None:
        """Launch the op `lm_head` for at most 64 rows."""
        check_shapes("lm_head", logits=logits, x=x, norm=norm, weight=weight)
        rest = np.int32(len(x)), np.int32(weight.shape[0]), np.float32(eps), np.float32(divisor)
        self._step(StepProduct("head", (logits,), x, norm, eps, rest), weight)

    def _step(
        self, product: StepProduct, weight: Weight, after: Handoff = NOTHING, ahead: Weight | None = None
    ) -> Handoff:
        if isinstance(weight, PackedWeight):
            return replace(self._packed.step(product, weight, after, ahead), comes_ahead=after.comes_ahead)
        launch_linear(
            self._launch, product, weight, self._device, prefers_shared=self._prefers_shared,
            comes_ahead=after.comes_ahead,
        )  # fmt: skip
        return Handoff(None, self._prefers_shared, after.comes_ahead)

    def _dense(
        self, y: DeviceArray, x: DeviceArray, weight: Weight, *, alpha: float = 1.0, beta: float = 0.0
    ) -> None:
        """Compute y = alpha x weight^T + beta y for the rows of a chunk."""
        if isinstance(weight, PackedWeight):
            self._packed.chunk(y, x, weight, alpha=alpha, beta=beta)
        else:
            self._gemm(y, x, weight, alpha=alpha, beta=beta, chunk=self._chunk)

    def _normalised(self, x: DeviceArray, norm: DeviceArray | None, eps: float) -> DeviceArray:
        """Return the rows of a chunk as they enter a product: normalised, unless `norm` is None."""
        if norm is None:
            return x
        normed = self._normed[: len(x)]
        rms_norm(self._launch, normed, x, norm, eps)
        return normed


def _qkv_rest(q: DeviceArray, kv: KVPages, rope: DeviceArray | None, rows: Rows, eps: float) -> QkvRest:
    _, num_kv_heads, _, head_dim = kv.k.shape
    return QkvRest(
        rope, rows.positions, rows.locations, rows.slots, rows.block_tables, num_rows=np.int32(len(q)),
        num_heads=np.int32(q.shape[1] // head_dim), num_kv_heads=np.int32(num_kv_heads),
        pages_per_sequence=np.int32(rows.block_tables.shape[1]),
        num_positions=np.int32(0 if rope is None else rope.shape[1]), eps=np.float32(eps),
    )  # fmt: skip

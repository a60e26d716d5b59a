"""The op contract on a GPU: each op is one launch, or one fixed sequence of launches, on one stream."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from cpmrt.config import ModelConfig
from cpmrt.config.layers import LatentAttention
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops import rows as row_ops
from cpmrt.cuda.ops.attention.attention import AttentionOps, AttentionPlan
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.ops.products import Products
from cpmrt.memory.caches import CacheLayout

# The ops of kinds of layers that most models do not have are imported for a model that has them.
if TYPE_CHECKING:
    from cpmrt.cuda.ops.experts import ExpertOps
    from cpmrt.cuda.ops.latent import LatentPlan
    from cpmrt.cuda.ops.lightning import LightningOps


class CudaOps:
    """`ops.protocol.Ops` on CuPy arrays of storage words.

    `scratch` holds by name the workspace of the products and of attention as in `plan`, and the rows' `slots` and
    `chunk`. A draft has an instance of its own, in its sizes.
    """

    def __init__(
        self, device: Device, launcher: Launcher, gemm: Gemm, scratch: Mapping[str, DeviceArray],
        plan: AttentionPlan | LatentPlan,
    ):  # fmt: skip
        self.embed = partial(row_ops.embed, launcher, scratch["slots"])
        self.rms_norm, self.join = partial(row_ops.rms_norm, launcher), partial(row_ops.join, launcher)
        self.copy_columns, self.clear = partial(row_ops.copy_columns, launcher), partial(row_ops.clear, launcher)
        self.gate_rows = partial(row_ops.gate_rows, launcher)
        others_prefer_shared = not isinstance(plan, AttentionPlan) or "expert_words" in scratch
        heads = plan.decode if isinstance(plan, AttentionPlan) else None
        products = Products(device, launcher, gemm, scratch, heads, prefers_shared=others_prefer_shared)
        self.qkv, self.project, self.project_residual = products.qkv, products.project, products.project_residual
        self.gate_up, self.lm_head = products.gate_up, products.lm_head
        attention = latent = None
        if isinstance(plan, AttentionPlan):
            attention = AttentionOps(launcher, plan, scratch, products.held_layers)
        else:
            from cpmrt.cuda.ops.latent import LatentOps

            latent = LatentOps(launcher, plan, scratch, self.project)
        self.select_blocks = attention.select_blocks if attention else _unplanned
        self.decode_attention = attention.decode_attention if attention else _unplanned
        self.prefill_attention = attention.prefill_attention if attention else _unplanned
        self.append_latent = latent.append_latent if latent else _unplanned
        self.decode_latent_attention = latent.decode_latent_attention if latent else _unplanned
        self.prefill_latent_attention = latent.prefill_latent_attention if latent else _unplanned
        states = _lightning_ops(launcher, scratch["chunk"]) if "lightning_states" in scratch else None
        self.lightning_decode = states.decode if states else _unplanned
        self.lightning_prefill = states.prefill if states else _unplanned
        self.lightning_accept = states.accept if states else _unplanned
        experts = _expert_ops(device, launcher, scratch) if "expert_starts" in scratch else None
        self.route = experts.route if experts else _unplanned
        self.experts_gate_up = experts.experts_gate_up if experts else _unplanned
        self.experts_down = experts.experts_down if experts else _unplanned


def _lightning_ops(launcher: Launcher, chunk: DeviceArray) -> LightningOps:
    from cpmrt.cuda.ops.lightning import LightningOps

    return LightningOps(launcher, chunk)


def _expert_ops(device: Device, launcher: Launcher, scratch: Mapping[str, DeviceArray]) -> ExpertOps:
    from cpmrt.cuda.ops.experts import ExpertOps

    return ExpertOps(device, launcher, scratch)


def attention_plan(
    config: ModelConfig, device: Device, caches: CacheLayout, max_rows: int, step_rows: int
) -> AttentionPlan | LatentPlan:
    """Return the plan of the attention that layers share, for chunks of at most `max_rows` rows and other steps of at
    most `step_rows` rows."""
    latent = config.of_kind(LatentAttention)
    if latent is not None:
        from cpmrt.cuda.ops.latent import LatentPlan

        return LatentPlan.of(latent, device, caches, max_rows, step_rows)
    return AttentionPlan.of(config.grouped_attention, device, caches, max_rows)


def _unplanned(*operands: Any, **options: Any) -> NoReturn:
    raise AssertionError("an op of a kind of layer that the model does not have")

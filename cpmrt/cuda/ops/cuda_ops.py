"""The op contract on a GPU: each op is one launch, or one fixed sequence of launches, on one stream."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops import rows as row_ops
from cpmrt.cuda.ops.attention.attention import AttentionOps, AttentionPlan
from cpmrt.cuda.ops.experts import ExpertOps
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.ops.lightning import LightningOps
from cpmrt.cuda.ops.products import Products
from cpmrt.errors import UnsupportedModelError


class CudaOps:
    """`ops.protocol.Ops` on CuPy arrays of storage words.

    `scratch` holds by name the workspace of the products and of the attention `plan`, and `slots` and `chunk` of the
    rows. A draft has an instance of its own, in its sizes.
    """

    def __init__(
        self, device: Device, launcher: Launcher, gemm: Gemm, scratch: Mapping[str, DeviceArray], plan: AttentionPlan
    ):
        self.embed = partial(row_ops.embed, launcher, scratch["slots"])
        self.rms_norm, self.join = partial(row_ops.rms_norm, launcher), partial(row_ops.join, launcher)
        self.copy_columns, self.clear = partial(row_ops.copy_columns, launcher), partial(row_ops.clear, launcher)
        self.gate_rows = partial(row_ops.gate_rows, launcher)
        attention = AttentionOps(launcher, plan, scratch)
        self.select_blocks, self.decode_attention = attention.select_blocks, attention.decode_attention
        self.prefill_attention = attention.prefill_attention
        products = Products(device, launcher, gemm, scratch)
        self.qkv, self.project, self.project_residual = products.qkv, products.project, products.project_residual
        self.gate_up, self.lm_head = products.gate_up, products.lm_head
        self.append_latent = self.decode_latent_attention = self.prefill_latent_attention = _refuse_latents
        states = LightningOps(launcher, scratch["chunk"])
        self.lightning_decode, self.lightning_prefill = states.decode, states.prefill
        experts = ExpertOps(device, launcher, scratch)
        self.route, self.experts_gate_up = experts.route, experts.experts_gate_up
        self.experts_down = experts.experts_down


def _refuse_latents(*operands: Any) -> NoReturn:
    raise UnsupportedModelError("the CUDA executor does not take latent attention", fix="use executor='reference'")

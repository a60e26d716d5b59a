"""Makes small models with the mixers of MiniCPM3 (latent attention) and MiniCPM-SALA (lightning and gated attention).

They are about as large as the bundled model and are trained from scratch on its text, to be compared with a plain model
that is trained in the same way. Formulas: arXiv 2405.04434 for latent attention, arXiv 2405.17381 for lightning
attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from demo_model.export import write_checkpoint
from demo_model.network import Attention, MiniCPM, NetworkConfig, Projection, RMSNorm, rotate
from demo_model.short_run import ShortPlan, short_run

ATTENTION, LIGHTNING = "minicpm4", "lightning-attn"


@dataclass(frozen=True)
class LatentConfig(NetworkConfig):
    """A config with MiniCPM3's fields; with fewer heads than the bundled model, for about as many parameters."""

    architecture: ClassVar[str] = "MiniCPM3ForCausalLM"
    model_type: ClassVar[str] = "minicpm3"

    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 96
    q_lora_rank: int = 128
    kv_lora_rank: int = 256
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64

    def mixer(self, layer: int) -> nn.Module:
        return LatentAttention(self)

    @property
    def rope_dim(self) -> int:
        return self.qk_rope_head_dim


class LatentAttention(nn.Module):
    """Causal attention whose keys and values are projected from a latent vector that is narrower than they are."""

    def __init__(self, config: LatentConfig) -> None:
        super().__init__()
        self.config, heads = config, config.num_attention_heads
        query_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        self.q_a_proj = Projection(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = Projection(config.q_lora_rank, heads * query_dim)
        self.kv_a_proj_with_mqa = Projection(config.hidden_size, config.kv_lora_rank + config.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = Projection(config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim))
        self.o_proj = Projection(heads * config.v_head_dim, config.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        config, (rows, length, _) = self.config, x.shape
        # The model's own code rounds the table to the type of the activations.
        cos, sin = cos.to(x.dtype).float(), sin.to(x.dtype).float()
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query = query.view(rows, length, config.num_attention_heads, -1).transpose(1, 2)
        plain, turned = query.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
        latent, shared = self.kv_a_proj_with_mqa(x).split((config.kv_lora_rank, config.qk_rope_head_dim), dim=-1)
        made = self.kv_b_proj(self.kv_a_layernorm(latent))
        made = made.view(rows, length, config.num_attention_heads, -1).transpose(1, 2)
        key, value = made.split((config.qk_nope_head_dim, config.v_head_dim), dim=-1)
        shared = rotate(shared[:, None], cos, sin).expand(-1, config.num_attention_heads, -1, -1)
        query, key = torch.cat((plain, rotate(turned, cos, sin)), dim=-1), torch.cat((key, shared), dim=-1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


@dataclass(frozen=True)
class HybridConfig(NetworkConfig):
    """A config with MiniCPM-SALA's fields. The first and last of eight layers have softmax attention: a quarter, as in
    the 9B model."""

    architecture: ClassVar[str] = "MiniCPMSALAForCausalLM"
    model_type: ClassVar[str] = "minicpm_sala"

    mixer_types: tuple[str, ...] = (ATTENTION, *(LIGHTNING,) * 6, ATTENTION)
    qk_norm: bool = True
    attn_use_rope: bool = False
    attn_use_output_gate: bool = True
    lightning_nh: int = 4
    lightning_nkv: int = 4
    lightning_head_dim: int = 64
    lightning_scale: str = "1/sqrt(d)"
    lightning_use_rope: bool = True
    use_output_gate: bool = True
    use_output_norm: bool = True

    def mixer(self, layer: int) -> nn.Module:
        return LightningAttention(self) if self.mixer_types[layer] == LIGHTNING else GatedAttention(self)


class GatedAttention(Attention):
    """Attention without rotary embedding, whose output is gated by the sigmoid of a projection of the layer's input."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self.o_gate = Projection(config.hidden_size, config.num_attention_heads * config.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.o_proj(self.mixed(x, None) * self.o_gate(x).sigmoid())


class LightningAttention(nn.Module):
    """Linear attention: the weight of a token is the product of its key with the query, and decays with its age."""

    slopes: Tensor

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        heads, dim = config.lightning_nh, config.lightning_head_dim
        self.head_dim = dim
        self.q_proj, self.k_proj, self.v_proj = (Projection(config.hidden_size, heads * dim) for _ in range(3))
        self.q_norm, self.k_norm = RMSNorm(dim, config.rms_norm_eps), RMSNorm(dim, config.rms_norm_eps)
        self.o_norm = RMSNorm(heads * dim, config.rms_norm_eps)
        self.z_proj = Projection(config.hidden_size, heads * dim)
        self.o_proj = Projection(heads * dim, config.hidden_size)
        # ALiBi's slopes for a number of heads that is a power of two.
        slopes = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)])
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        query, key, value = (
            projection(x).view(rows, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(self.q_norm(query), cos, sin), rotate(self.k_norm(key), cos, sin)
        age = torch.arange(length, device=x.device)
        age = age[:, None] - age
        decay = torch.exp(-self.slopes[:, None, None] * age.clamp(min=0)).masked_fill(age < 0, 0.0)
        weights = (query @ key.mT).float() * (decay * self.head_dim**-0.5)
        mixed = (weights.to(x.dtype) @ value).transpose(1, 2).reshape(rows, length, -1)
        return self.o_proj(self.o_norm(mixed) * self.z_proj(x).sigmoid())


CONFIGS: dict[str, type[NetworkConfig]] = {"plain": NetworkConfig, "latent": LatentConfig, "hybrid": HybridConfig}


def make_family_model(kind: str, out: Path, plan: ShortPlan, device: torch.device) -> None:
    """Trains a model of `kind`, a key of CONFIGS, and writes its checkpoint folder; prints what it measures."""
    with short_run(plan, device) as run:
        config = CONFIGS[kind]()
        network = MiniCPM(config, torch.bfloat16).to(device)
        print(f"{kind}: {sum(parameter.numel() for parameter in network.parameters()):,} parameters", flush=True)
        run.train(network)
        save_file(network.state_dict(), str(run.work / "weights.safetensors"))
        loss = run.held_out_loss(write_checkpoint(run.work, out, config, device))
        print(f"as written, in bf16: held-out loss {loss:.4f}, {run.bits_per_byte(loss):.4f} bits a byte", flush=True)

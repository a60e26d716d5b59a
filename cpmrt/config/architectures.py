"""The supported architectures: one row each. Rows differ in defaults and switches, not in code.

A row holds what the Hugging Face configuration class assumes where config.json is silent. Sources: the configuration
classes of transformers 5.23 (Llama, Qwen2, Qwen3) and of the MiniCPM model repositories (`MiniCPMConfig`,
`MiniCPM3Config`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """Class defaults and fixed traits of one decoder architecture."""

    name: str
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    head_dim: int | None = None
    """Elements of a head; None for hidden_size / num_attention_heads."""
    num_kv_heads: int | None = None
    """KV heads; None for as many as query heads."""
    fixed_qkv_bias: bool = False
    """Whether q, k and v always have a bias, whatever `attention_bias` says."""
    qk_norm: bool = False
    """Whether each query and key head is normalised (RMSNorm) before RoPE."""
    latent_attention: bool = False
    """Whether attention is multi-head latent attention, with the sizes q_lora_rank, kv_lora_rank, qk_nope_head_dim and
    qk_rope_head_dim."""
    mup: bool = False
    """Whether scale_emb, scale_depth and dim_model_base apply."""
    lists_mixers: bool = False
    """Whether `mixer_types` names the kind of each layer's mixer (`config.hybrid`)."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    """The token that ends a text where neither config.json nor generation_config.json names one."""


ARCHITECTURES = {
    row.name: row
    for row in (
        Architecture("LlamaForCausalLM", bos_token_id=1, eos_token_id=2),
        Architecture("MiniCPMForCausalLM", tie_word_embeddings=True, mup=True, bos_token_id=1, eos_token_id=2),
        Architecture(
            "MiniCPM3ForCausalLM", tie_word_embeddings=True, latent_attention=True, mup=True, bos_token_id=1,
            eos_token_id=2,
        ),
        Architecture(
            "MiniCPMSALAForCausalLM", tie_word_embeddings=True, mup=True, lists_mixers=True, bos_token_id=1,
            eos_token_id=2,
        ),
        Architecture("Qwen2ForCausalLM", max_position_embeddings=32768, num_kv_heads=32, fixed_qkv_bias=True),
        Architecture(
            "Qwen3ForCausalLM", max_position_embeddings=32768, num_kv_heads=32, head_dim=128, qk_norm=True
        ),
    )
}

MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "minicpm_sala": "MiniCPMSALAForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

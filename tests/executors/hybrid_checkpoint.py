"""A folder with a small model of MiniCPM-SALA's architecture, and a smaller one beside it that drafts for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_checkpoint import write_checkpoint

SIZES: dict[str, Any] = {
    "architectures": ["MiniCPMSALAForCausalLM"], "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64, "tie_word_embeddings": False,
    "mixer_types": ["minicpm4", "lightning-attn", "lightning-attn", "minicpm4"], "qk_norm": True,
    "attn_use_rope": False, "attn_use_output_gate": True, "lightning_nh": 3, "lightning_nkv": 3,
    "lightning_head_dim": 64, "lightning_scale": "1/sqrt(d)", "lightning_use_rope": True, "use_output_gate": True,
    "use_output_norm": True,
    "sparse_config": {"init_blocks": 1, "window_size": 64, "topk": 3, "dense_len": -1, "use_nope": False},
}  # fmt: skip
PAIR = {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 128, "head_dim": 64}


def write_hybrid(root: Path, **config: Any) -> Path:
    """Write the model and, in its folder `draft`, one layer of plain attention; keywords replace keys of the model."""
    folder = write_checkpoint(root, **SIZES | config)
    write_checkpoint(root / "draft", **PAIR)
    return folder

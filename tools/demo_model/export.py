"""Writes the checkpoint folder: bf16 weights, configuration, tokenizer, and the rounded network itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from demo_model.network import MiniCPM, NetworkConfig
from demo_model.tokenizer import BOS_ID, EOS_ID, IM_END_ID, tokenizer_config

MAX_FOLDER_BYTES = 16_000_000


def checkpoint_config(config: NetworkConfig) -> dict[str, object]:
    """The contents of `config.json`, in MiniCPM's fields."""
    factors = config.rope_factors
    return {
        "architectures": ["MiniCPMForCausalLM"],
        "model_type": "minicpm",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": {
            "rope_type": "longrope",
            "long_factor": factors,
            "short_factor": factors,
            "original_max_position_embeddings": config.max_position_embeddings,
        },
        "scale_emb": config.scale_emb,
        "scale_depth": config.scale_depth,
        "dim_model_base": config.dim_model_base,
        "mup_denominator": config.num_hidden_layers,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        "use_cache": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": [EOS_ID, IM_END_ID],
        "pad_token_id": EOS_ID,
        "torch_dtype": "bfloat16",
    }


def generation_config() -> dict[str, object]:
    """The contents of `generation_config.json`."""
    return {
        "bos_token_id": BOS_ID,
        "eos_token_id": [EOS_ID, IM_END_ID],
        "pad_token_id": EOS_ID,
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.8,
    }


def write_json(path: Path, content: dict[str, object]) -> None:
    """Readable JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_checkpoint(work: Path, out: Path, config: NetworkConfig, device: torch.device) -> MiniCPM:
    """Fills `out` and returns the network with the weights as they were rounded."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.bfloat16() for name, tensor in load_file(str(work / "weights.safetensors")).items()
    }
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    shutil.copyfile(work / "tokenizer.json", out / "tokenizer.json")
    write_json(out / "config.json", checkpoint_config(config))
    write_json(out / "generation_config.json", generation_config())
    write_json(out / "tokenizer_config.json", tokenizer_config(config.max_position_embeddings))
    network = MiniCPM(config, torch.bfloat16)
    network.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return network.to(device).eval()


def check_folder_size(out: Path) -> int:
    """The folder's size in bytes; raises if it would be too large to bundle."""
    size = sum(path.stat().st_size for path in out.iterdir() if path.is_file())
    if size > MAX_FOLDER_BYTES:
        raise ValueError(f"{out} holds {size} bytes, more than {MAX_FOLDER_BYTES}: make the network smaller")
    return size

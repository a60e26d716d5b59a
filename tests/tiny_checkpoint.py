"""A checkpoint of random weights in a folder: two layers, a tokenizer of single bytes, a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from cpmrt.config import ModelConfig
from cpmrt.models.decoder import tensor_specs

CONFIG: dict[str, Any] = {
    "architectures": ["MiniCPMForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 259, "scale_emb": 4,
    "scale_depth": 1.4, "dim_model_base": 32, "max_position_embeddings": 2048, "torch_dtype": "float32",
    "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "[bot{% if enable_thinking is defined %} thinking={{ enable_thinking }}{% endif %}]"
)


def write_checkpoint(folder: Path, **config: Any) -> Path:
    """Fill `folder`; keyword arguments replace keys of the config."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = CONFIG | config
    (folder / "config.json").write_text(json.dumps(settings))
    random, tensors = np.random.default_rng(5), {}
    for spec in tensor_specs(ModelConfig.from_hf(settings)):
        for source in spec.sources:
            scale = source.shape[-1] ** -0.5 if len(source.shape) > 1 else 0.1
            values = random.standard_normal(source.shape) * scale + (len(source.shape) == 1)
            tensors[source.name] = values.astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json: <unk>, <s>, </s> and the 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {char: 3 + i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

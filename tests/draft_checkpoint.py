"""A target of random weights and drafts for it, in the folders and under the names that their makers give them.

The vocabulary is so small that even a random draft is often right.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 24, 32, 48, 4, 2, 8
MARKOV_RANK = 6
TARGET: dict[str, Any] = {
    "architectures": ["MiniCPMForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": 3, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "vocab_size": VOCAB, "scale_emb": 4, "scale_depth": 1.4, "dim_model_base": 16, "max_position_embeddings": 512,
    "torch_dtype": "float32", "eos_token_id": 2, "bos_token_id": 1, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
DRAFT = TARGET | {"num_hidden_layers": 1, "mup_denominator": 32}
Tensors = dict[str, np.ndarray]


def _random(seed: int, **shapes: tuple[int, ...]) -> Tensors:
    random = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.2)
        made[name] = (values + (len(shape) == 1 and "norm" in name)).astype(np.float32)
    return made


def _layer(prefix: str, inputs: int = HIDDEN, hidden: int = HIDDEN, inner: int = INNER) -> dict[str, tuple[int, ...]]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.self_attn.q_proj.weight": (q, inputs),
        f"{prefix}.self_attn.k_proj.weight": (kv, inputs),
        f"{prefix}.self_attn.v_proj.weight": (kv, inputs),
        f"{prefix}.self_attn.o_proj.weight": (hidden, q),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}.mlp.up_proj.weight": (inner, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner),
    }


def target_tensors(seed: int = 1, layers: int = 3) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(layers):
        shapes |= _layer(f"model.layers.{layer}")
    made = _random(seed, **shapes, **{"lm_head.weight": (VOCAB, HIDDEN)})
    made["lm_head.weight"] *= 4
    return made


def eagle2_tensors(
    family: str = "vllm", *, layers: int = 1, seed: int = 2, norms: bool = True, bias: bool = False
) -> Tensors:
    """Return an EAGLE draft's tensors by name, as vllm or cpmcu (`family`) names them.

    Without `norms` it is a classic EAGLE draft, whose first layer has no input norm either.
    """
    stem, layer_name = ("model.", "model.eagle_layers") if family == "vllm" else ("", "layers")
    shapes: dict[str, tuple[int, ...]] = {f"{stem}fc.weight": (HIDDEN, 2 * HIDDEN)}
    shapes[f"{stem}embed_tokens.weight"] = (VOCAB, HIDDEN)
    if norms:
        shapes |= {f"{stem}input_norm1.weight": (HIDDEN,), f"{stem}input_norm2.weight": (HIDDEN,)}
    if bias:
        shapes[f"{stem}fc.bias"] = (HIDDEN,)
    for layer in range(layers):
        shapes |= _layer(f"{layer_name}.{layer}")
    if not norms:
        del shapes[f"{layer_name}.0.input_layernorm.weight"]
    if family == "vllm":
        shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    return _random(seed, **shapes)


def eagle3_tensors(*, draft_vocab: int = 18, seed: int = 3) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 3 * HIDDEN), "midlayer.hidden_norm.weight": (HIDDEN,)}
    shapes |= _layer("midlayer", inputs=2 * HIDDEN)
    shapes |= {"norm.weight": (HIDDEN,), "lm_head.weight": (draft_vocab, HIDDEN)}
    made = _random(seed, **shapes)
    ids = np.sort(np.random.default_rng(seed).permutation(VOCAB)[:draft_vocab])
    made["d2t"] = (ids - np.arange(draft_vocab)).astype(np.int64)
    made["t2d"] = np.isin(np.arange(VOCAB), ids)
    return made


def dspark_tensors(*, layers: int = 2, taps: int = 2, confidence: bool = True, seed: int = 14) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, taps * HIDDEN), "hidden_norm.weight": (HIDDEN,)}
    for layer in range(layers):
        heads = {f"layers.{layer}.self_attn.{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
        shapes |= _layer(f"layers.{layer}", inner=DSPARK["intermediate_size"]) | heads
    shapes |= {f"markov_head.markov_{part}.weight": (VOCAB, MARKOV_RANK) for part in ("w1", "w2")}
    if confidence:
        proj = "confidence_head.proj"
        shapes |= {f"{proj}.weight": (1, HIDDEN + MARKOV_RANK), f"{proj}.bias": (1,)}
    made = _random(seed, **shapes, **{"norm.weight": (HIDDEN,)})
    made["markov_head.markov_w1.weight"] *= 3
    return made


def write_folder(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


EAGLE3 = {key: value for key, value in DRAFT.items() if key not in ("scale_depth", "mup_denominator")} | {
    "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 18, "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}  # fmt: skip

_SCALES = ("scale_emb", "scale_depth", "dim_model_base")
DSPARK = {key: value for key, value in TARGET.items() if key not in _SCALES} | {
    "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_hidden_layers": 2, "block_size": 5,
    "intermediate_size": 64,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "mask_token_id": 3, "markov_rank": MARKOV_RANK,
    "markov_head_type": "vanilla", "target_layer_ids": [0, 1], "num_target_layers": 3, "sample_from_anchor": True,
    "confidence_head_with_markov": True,
}  # fmt: skip

EAGLE_OF_VLLM = DRAFT | {"architectures": ["EagleMiniCPMForCausalLM"]}
"""A config like that of `MiniCPM4-8B-Eagle-vLLM`: the embedding is the target's; its head is used if it differs."""


def eagle_of_vllm_tensors(*, own_head: bool = True) -> Tensors:
    target = target_tensors()
    made = eagle2_tensors("vllm", seed=6) | {"model.embed_tokens.weight": target["model.embed_tokens.weight"]}
    head = target["lm_head.weight"]
    # The draft's head is the target's with some noise, so that the draft is often right.
    made["lm_head.weight"] = head + 0.4 * made["lm_head.weight"] if own_head else head
    return made


def write_all(root: Path) -> Path:
    """Fill `root` with a target and drafts of every kind, each in a folder of its own; return `root`."""
    write_folder(root / "target", TARGET, target_tensors())
    write_folder(root / "vllm", DRAFT, eagle2_tensors("vllm"))
    write_folder(root / "cpmcu", DRAFT | {"num_hidden_layers": 2}, eagle2_tensors("cpmcu", layers=2, bias=True))
    write_folder(root / "classic", DRAFT, eagle2_tensors("cpmcu", norms=False, bias=True))
    frequent = write_folder(root / "frequent", DRAFT, eagle2_tensors("vllm", seed=5))
    (frequent / "freq_16.json").write_text(json.dumps([*range(7, 23)]))
    write_folder(root / "of vllm", EAGLE_OF_VLLM, eagle_of_vllm_tensors())
    write_folder(root / "eagle3", EAGLE3, eagle3_tensors())
    write_folder(root / "dspark", DSPARK, dspark_tensors())
    frequent = write_folder(root / "frequent dspark", DSPARK, dspark_tensors(seed=8))
    (frequent / "freq_16.json").write_text(json.dumps([*range(22, 6, -1)]))
    write_folder(root / "model", TARGET | {"num_hidden_layers": 1}, target_tensors(seed=7, layers=1))
    return root

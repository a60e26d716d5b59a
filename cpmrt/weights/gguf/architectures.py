"""The architectures of GGUF files that cpmrt runs, and what their tensors are called in Hugging Face checkpoints.

Source: the converters and `gguf.TENSOR_NAMES` of llama.cpp, which define both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cpmrt.errors import CheckpointError, UnsupportedModelError, quoted
from cpmrt.weights.gguf.header import Value

ARCHITECTURE_KEY = "general.architecture"
_LAYER = re.compile(r"blk\.(\d{1,5})\.(.+)\.(weight|bias)")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
NOT_WEIGHTS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
"""Tensors that are no weights: the config is made from them."""


@dataclass(frozen=True)
class GgufArchitecture:
    """One architecture: its `name` in the file and its `hugging_face` name in config.json.

    `parts` names tensors of its layers that are not in `_PARTS`. `paired`: the rows of a query or key head lie in pairs
    in the file, row j and row j + half the head's rows one after another.
    """

    name: str
    hugging_face: str
    paired: bool = False
    parts: Mapping[str, str] = field(default_factory=dict)

    def hugging_face_name(self, name: str) -> str:
        """Return the name that a tensor of the file has in a Hugging Face checkpoint; its own name if it has none."""
        if match := _LAYER.fullmatch(name):
            layer, part, kind = match.groups()
            renamed = self.parts.get(part) or _PARTS.get(part)
            return f"model.layers.{int(layer)}.{renamed}.{kind}" if renamed else name
        return _TOP.get(name, name)

    def gguf_name(self, name: str) -> str:
        """Return the name in the file of a tensor of a Hugging Face checkpoint: the inverse of `hugging_face_name`."""
        top = {hugging_face: own for own, hugging_face in _TOP.items()}
        if name in top:
            return top[name]
        _, _, layer, rest = name.split(".", 3)
        module, _, kind = rest.rpartition(".")
        parts = {renamed: part for part, renamed in (_PARTS | dict(self.parts)).items()}
        return f"blk.{layer}.{parts[module]}.{kind}"

    def pairs_rows(self, name: str) -> bool:
        """Whether the rows of this tensor (its Hugging Face name) lie in pairs."""
        return self.paired and name.rpartition(".")[0].endswith(("self_attn.q_proj", "self_attn.k_proj"))


GGUF_ARCHITECTURES = {
    row.name: row
    for row in (
        GgufArchitecture("llama", "LlamaForCausalLM", paired=True),
        GgufArchitecture("minicpm", "MiniCPMForCausalLM", paired=True),
        GgufArchitecture("minicpm3", "MiniCPM3ForCausalLM", parts=_LATENT),
        GgufArchitecture("qwen2", "Qwen2ForCausalLM"),
        GgufArchitecture("qwen3", "Qwen3ForCausalLM"),
    )
}


def architecture_of(metadata: Mapping[str, Value], path: Path) -> GgufArchitecture:
    """Return the architecture that a file's keys name. Raises UnsupportedModelError; CheckpointError if they name none.
    """
    name = metadata.get(ARCHITECTURE_KEY)
    if not isinstance(name, str):
        raise CheckpointError(f"{path}: key {quoted(ARCHITECTURE_KEY)}", expected="a name", actual=quoted(name))
    if name not in GGUF_ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path}: architecture {quoted(name)} is not supported", expected="one of " + ", ".join(GGUF_ARCHITECTURES),
            fix="or use the safetensors files of the model, if its architecture is supported there",
        )  # fmt: skip
    return GGUF_ARCHITECTURES[name]

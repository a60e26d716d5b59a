"""Small quantised checkpoints of every format, as their producers lay them out.

Any 32-bit word is eight valid codes, so the quantised tensors are seeded random words, and no packing code is needed
to make them. The readers and the oracle of `tools/make_golden.py` unpack them independently of each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from reference.tiny_models import GOLDEN, LLAMA, MINICPM, random_weights, unpacked
from tiny_checkpoint import write_tokenizer

from cpmrt.config import ModelConfig
from cpmrt.dtypes import Array, DType, from_float32, to_float32
from cpmrt.models.decoder import tensor_specs
from cpmrt.reference.philox import philox

QUANTISED_GOLDEN = GOLDEN / "quantised"
Tensors = dict[str, tuple[str, Array]]
"""The safetensors type and the words of each tensor, by name."""

# Sizes that every executor takes; 264 tokens hold the bytes of the test tokenizer.
_SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 264, "torch_dtype": "float16",
}  # fmt: skip
_LLAMA = LLAMA | _SIZES
_MINICPM = MINICPM | _SIZES | {"dim_model_base": 32}
_EXPERTS = _MINICPM | {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128}
_HYBRID = _MINICPM | {
    "architectures": ["MiniCPMSALAForCausalLM"], "mixer_types": ["minicpm4", "lightning-attn"], "num_hidden_layers": 2,
    "head_dim": 64, "qk_norm": True, "attn_use_rope": False, "attn_use_output_gate": True, "lightning_nh": 2,
    "lightning_head_dim": 64, "lightning_use_rope": True, "use_output_gate": True, "use_output_norm": True,
}  # fmt: skip
_QWEN2 = _LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_LATENT = _MINICPM | {
    "architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3", "num_key_value_heads": 2, "q_lora_rank": 128,
    "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
_AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}
_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False}


def _compressed(ignore: tuple[str, ...] = ("lm_head",), **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"weights": _WEIGHTS | weights}}, "ignore": list(ignore),
        "kv_cache_scheme": None,
    }  # fmt: skip


@dataclass(frozen=True)
class QuantisedCase:
    """A quantised checkpoint: its config.json, its quantisation settings and how its tensors are laid out.

    `layout` is gptq, awq, compressed or marlin. `order` is the order of columns: "" none, "shared" as act-order gives
    it, "apart" with orders of their own for v_proj and up_proj. `plain` and `small_groups` are ends of the names of
    modules in 16 bits, and of those in groups of 32.
    """

    name: str
    config: dict[str, Any]
    settings: dict[str, Any]
    layout: str
    group_size: int = 128
    zeros: str = "symmetric"
    v1: bool = False
    scales: str = "F16"
    order: str = ""
    plain: tuple[str, ...] = ()
    small_groups: tuple[str, ...] = ()
    head: bool = False
    beside: bool = False
    """Whether the settings are in quantize_config.json instead of config.json."""
    key: str = "quantization_config"
    file: str = "model.safetensors"

    def group_of(self, module: str, columns: int) -> int:
        if self.small_groups and module.endswith(self.small_groups):
            return 32
        return columns if self.group_size == -1 else self.group_size


CASES = (
    QuantisedCase("gptq", _LLAMA, _GPTQ | {"checkpoint_format": "gptq"}, "gptq", v1=True),
    QuantisedCase(
        "gptq_asymmetric", _MINICPM, _GPTQ | {"sym": False, "group_size": 64}, "gptq", 64, "random", v1=True,
        beside=True,
    ),
    QuantisedCase(
        "gptq_v2_act_order", _LLAMA,
        _GPTQ | {"sym": False, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq_v2"},
        "gptq", 32, "random", order="shared", scales="BF16",
    ),
    QuantisedCase(
        "gptq_orders_apart", _LLAMA, _GPTQ | {"desc_act": True, "group_size": 64}, "gptq", 64, v1=True, order="apart"
    ),
    QuantisedCase("gptq_row", _QWEN2, _GPTQ | {"group_size": -1, "lm_head": True}, "gptq", -1, v1=True, head=True),
    QuantisedCase(
        "gptq_dynamic", _LLAMA,
        _GPTQ | {"dynamic": {"-:.*\\.0\\.mlp\\.up_proj": {}, "+:.*o_proj": {"group_size": 32}}},
        "gptq", v1=True, plain=("0.mlp.up_proj",), small_groups=("o_proj",),
    ),
    QuantisedCase(
        "gptq_latent", _LATENT, _GPTQ | {"desc_act": True, "group_size": 64}, "gptq", 64, v1=True, order="shared"
    ),
    QuantisedCase("awq_latent", _LATENT, _AWQ | {"modules_to_not_convert": None}, "awq", zeros="random"),
    QuantisedCase("awq", _LLAMA, _AWQ | {"modules_to_not_convert": None}, "awq", zeros="random"),
    QuantisedCase(
        "awq_some", _MINICPM, _AWQ | {"group_size": 64, "modules_to_not_convert": ["o_proj", "layers.1.mlp"]},
        "awq", 64, "random", plain=("o_proj", "1.mlp.gate_proj", "1.mlp.up_proj", "1.mlp.down_proj"),
    ),
    QuantisedCase(
        "auto_round_gptq", _LLAMA, _AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"}, "gptq", v1=True
    ),
    QuantisedCase(
        "auto_round_awq", _LLAMA, _AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "sym": False}, "awq",
        zeros="random",
    ),
    QuantisedCase("compressed", _LLAMA, _compressed(), "compressed", scales="BF16"),
    QuantisedCase(
        "compressed_asymmetric", _MINICPM,
        _compressed(symmetric=False, group_size=32, actorder="group"), "compressed", 32, "random", order="shared",
        key="compression_config",
    ),
    QuantisedCase(
        "compressed_channel", _LLAMA,
        _compressed(("lm_head", "re:.*k_proj"), strategy="channel", group_size=None), "compressed", -1,
        plain=("k_proj",),
    ),
    QuantisedCase(
        "marlin", _MINICPM, _GPTQ | {"checkpoint_format": "gptq", "static_groups": True}, "marlin",
        file="model_gptq.safetensors",
    ),
    QuantisedCase("gptq_experts", _EXPERTS, _GPTQ | {"checkpoint_format": "gptq"}, "gptq", v1=True),
    QuantisedCase("awq_experts", _EXPERTS, _AWQ | {"group_size": 64}, "awq", 64, "random"),
    QuantisedCase(
        "gptq_hybrid", _HYBRID, _GPTQ | {"dynamic": {"-:.*o_gate": {}, "-:.*z_proj": {}}}, "gptq", v1=True,
        plain=("o_gate", "z_proj"),
    ),
    QuantisedCase("marlin_row", _LLAMA, _GPTQ | {"group_size": -1}, "marlin", -1),
)  # fmt: skip


def _words(name: str, count: int, seed: int) -> Array:
    counters = np.zeros((-(-count // 4), 4), np.uint32)
    counters[:, 0] = np.arange(len(counters))
    counters[:, 1] = crc32(name.encode())
    counters[:, 2] = 1
    return philox(counters, seed).reshape(-1)[:count]


def modules(case: QuantisedCase) -> Iterator[tuple[str, int, int]]:
    """Yield every module that the checkpoint quantises, with its rows and columns."""
    config = ModelConfig.from_hf(case.config)
    sources = [source for spec in tensor_specs(config) for source in spec.sources]
    fused = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
    for source in sources:
        module = source.name.removesuffix(".weight")
        parent, _, last = module.rpartition(".")
        if len(source.shape) < 2 or last in ("embed_tokens", "gate") or (last == "lm_head" and not case.head):
            continue
        if module.endswith(case.plain) and case.plain:
            continue
        if case.layout == "marlin" and last in ("k_proj", "v_proj", "up_proj"):
            continue
        if case.layout == "marlin" and last in fused:
            attention, inner = config.grouped_attention, config.mlp.intermediate_size
            rows = {"qkv_proj": attention.q_size + 2 * attention.kv_size, "gate_up_proj": 2 * inner}
            yield f"{parent}.{fused[last]}", rows[fused[last]], source.shape[1]
        else:
            yield module, *source.shape


def raw_tensors(case: QuantisedCase, seed: int) -> Tensors:
    """Return all tensors of the checkpoint."""
    tensors: Tensors = {}
    quantised = {module for module, _, _ in modules(case)}
    covered = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for module in tuple(quantised):
        parent, _, last = module.rpartition(".")
        quantised |= {f"{parent}.{part}" for part in covered.get(last, ())}
    specs = tensor_specs(ModelConfig.from_hf(case.config))
    for name, values in unpacked(specs, random_weights(specs, seed)).items():
        if name.removesuffix(".weight") not in quantised:
            tensors[name] = ("F16", values.astype(np.float16))
    for module, num_rows, num_columns in modules(case):
        tensors |= _quantised_tensors(case, module, num_rows, num_columns, seed)
    return tensors


def _quantised_tensors(case: QuantisedCase, module: str, n: int, k: int, seed: int) -> Tensors:
    group = case.group_of(module, k)
    groups = k // group
    shapes = {"gptq": (k // 8, n), "awq": (k, n // 8), "compressed": (n, k // 8), "marlin": (k // 16, 2 * n)}
    codes = _words(f"{module}.codes", n * k // 8, seed).view(np.int32).reshape(shapes[case.layout])
    unit = (_words(f"{module}.scales", n * groups, seed) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
    scales = (np.float32(0.5) + unit) * np.float32(0.3 * k**-0.5)
    stored = from_float32(scales, DType.BFLOAT16 if case.scales == "BF16" else DType.FLOAT16)
    if case.layout == "compressed":
        tensors: Tensors = {
            f"{module}.weight_packed": ("I32", codes),
            f"{module}.weight_scale": (case.scales, stored.reshape(n, groups)),
            f"{module}.weight_shape": ("I64", np.array([n, k], np.int64)),
        }
        if case.zeros == "random":
            zeros = _words(f"{module}.zeros", n * groups // 8, seed).view(np.int32).reshape(n // 8, groups)
            tensors[f"{module}.weight_zero_point"] = ("I32", zeros)
    else:
        tensors = {f"{module}.qweight": ("I32", codes), f"{module}.scales": (case.scales, stored.reshape(groups, n))}
        if case.layout != "marlin":
            tensors[f"{module}.qzeros"] = ("I32", _zero_words(case, module, n, groups, seed))
    if case.layout == "gptq" or case.order:
        name = f"{module}.{'weight_g_idx' if case.layout == 'compressed' else 'g_idx'}"
        tensors[name] = ("I32", _group_index(case, module, k, group, seed))
    return tensors


def _zero_words(case: QuantisedCase, module: str, n: int, groups: int, seed: int) -> Array:
    if case.zeros == "random":
        return _words(f"{module}.zeros", n * groups // 8, seed).view(np.int32).reshape(groups, n // 8)
    return np.full((groups, n // 8), 0x77777777 if case.v1 else 0x88888888, np.uint32).view(np.int32)


def _group_index(case: QuantisedCase, module: str, k: int, group: int, seed: int) -> Array:
    group_of = np.arange(k, dtype=np.int32) // group
    if not case.order:
        return group_of
    parent, _, last = module.rpartition(".")
    own = case.order == "apart" and last in ("v_proj", "up_proj")
    inputs = last if own or last in ("o_proj", "down_proj") else ""
    return group_of[np.argsort(_words(f"{parent}.{inputs}.order", k, seed), kind="stable")]


def write_quantised(case: QuantisedCase, folder: Path, seed: int, **settings: Any) -> Path:
    """Fill `folder` with the checkpoint and a tokenizer; keyword arguments replace keys of quantization_config."""
    folder.mkdir(parents=True, exist_ok=True)
    config, quantization = dict(case.config), case.settings | settings
    if case.beside:
        (folder / "quantize_config.json").write_text(json.dumps(quantization))
    else:
        config[case.key] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / case.file, raw_tensors(case, seed))
    write_tokenizer(folder)
    return folder


@cache
def golden(name: str) -> dict[str, Any]:
    """Return the arrays of a case's golden file."""
    with np.load(QUANTISED_GOLDEN / f"{name}.npz", allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def write_golden_cases(root: Path) -> dict[str, Path]:
    """Write every case's checkpoint, with the seed of its golden file, to a folder of its name; return the folders."""
    return {case.name: write_quantised(case, root / case.name, int(golden(case.name)["seed"])) for case in CASES}


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """Write a safetensors file of tensors of any types; bfloat16 may be given as uint16 words."""
    header, offset = {}, 0
    for name, (dtype, words) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(words.shape), "data_offsets": [offset, offset + words.nbytes]}
        offset += words.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(w.tobytes() for _, w in tensors.values()))


def as_float32(stored: tuple[str, Array]) -> Array:
    """Return the values of a tensor that is stored in 16 or 32 bits."""
    dtype = {"F16": DType.FLOAT16, "BF16": DType.BFLOAT16, "F32": DType.FLOAT32}[stored[0]]
    return to_float32(stored[1], dtype)

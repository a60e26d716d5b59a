"""Finds the config of the language model within a model that also sees or hears, and refuses models that do not run.

Sources: the config.json of MiniCPM-V-4 and MiniCPM-V-4_5, which are flat: the fields of a LlamaConfig and of a
Qwen3Config beside `vision_config`. Other files nest them, and tools may write how weights are quantised beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmrt.config.quantization import SECTIONS
from cpmrt.errors import ConfigError, UnsupportedModelError, quoted

_LANGUAGE_MODELS = {
    ("MiniCPMV", "4.0"): "LlamaForCausalLM",
    ("MiniCPMV", "4.5"): "Qwen3ForCausalLM",
    ("MiniCPMO", "4.5"): "Qwen3ForCausalLM",
}
"""Architecture and version of a model that sees or hears -> the architecture of its language model."""
_NESTED = ("text_config", "llm_config")
_RUNS = "the language model of MiniCPM-V 4.0 (a Llama) or 4.5 (a Qwen3)"
_GATED_DELTA = "layers with a gated delta rule, which no executor has", "Qwen3 (dense), MiniCPM4 or MiniCPM5"
_REFUSED = {
    "MiniCPMV4_6ForConditionalGeneration": (_GATED_DELTA[0], f"{_RUNS}, or MiniCPM5"),
    **dict.fromkeys(
        (f"Qwen3_5{size}For{what}" for size in ("", "Moe") for what in ("CausalLM", "ConditionalGeneration")),
        _GATED_DELTA,
    ),
    "Qwen3NextForCausalLM": _GATED_DELTA,
    "SiglipVisionModel": ("an encoder of images, no language model", _RUNS),
    "SiglipModel": ("an encoder of images and captions, no language model", _RUNS),
    "VoxCPMModel": ("speech, not text", "MiniCPM4, whose layers it shares"),
}
"""Architectures that are known and do not run -> what they have that is not supported, and what would run instead."""
_MODEL_TYPES = {
    "minicpmv4_6": "MiniCPMV4_6ForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "siglip": "SiglipModel",
    "siglip_vision_model": "SiglipVisionModel",
}


def text_part(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Return the config.json object of the language model in `config`: for most models `config` itself.

    Raises UnsupportedModelError for a model that is known not to run, naming one that does; ConfigError where a nested
    config is no object.
    """
    name = _architecture(config)
    if name in _REFUSED:
        what, instead = _REFUSED[name]
        raise UnsupportedModelError(f"{source}: {name} is not supported: it has {what}", fix=f"use {instead}")
    if name not in {wrapper for wrapper, _ in _LANGUAGE_MODELS}:
        return config
    version = _version(config)
    if (name, version) not in _LANGUAGE_MODELS:
        known = ", ".join(f"{version} of {wrapper}" for wrapper, version in _LANGUAGE_MODELS)
        raise UnsupportedModelError(
            f"{source}: the language model of {name}, version {version}, is not supported", expected=known,
            fix=f"use {_RUNS}",
        )  # fmt: skip
    key = next((key for key in _NESTED if config.get(key) is not None and "hidden_size" not in config), None)
    inner = config if key is None else config[key]
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{source}: {key}", expected="an object", actual=quoted(inner))
    outer = config if all(inner.get(section) is None for section in SECTIONS) else inner
    quantization = {section: outer[section] for section in SECTIONS if section in outer}
    return {**inner, **quantization, "architectures": [_LANGUAGE_MODELS[name, version]]}


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json's object without the quantisation settings in it and in a config nested in it."""
    plain = {key: value for key, value in config.items() if key not in SECTIONS}
    inner = {key: without_quantization(plain[key]) for key in _NESTED if isinstance(plain.get(key), Mapping)}
    return plain | inner


def _architecture(config: Mapping[str, Any]) -> str | None:
    names, kind = config.get("architectures"), config.get("model_type")
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
        return names[0]
    return _MODEL_TYPES.get(kind) if names is None and isinstance(kind, str) else None


def _version(config: Mapping[str, Any]) -> str:
    """Return the version, which some files have as a number, as text with one decimal: 4.0."""
    version: Any = config.get("version")
    try:
        return f"{float(version):.1f}"
    except (TypeError, ValueError, OverflowError):
        return quoted(version)

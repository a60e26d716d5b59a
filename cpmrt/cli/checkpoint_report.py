"""Everything `cpmrt inspect` shows, as plain data: gathered part by part, each defect noted instead of fatal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from cpmrt.config import EngineConfig, ModelConfig, RopeConfig
from cpmrt.errors import CpmrtError
from cpmrt.models.decoder import tensor_specs
from cpmrt.models.planning import weight_specs
from cpmrt.text import ChatTemplate, Tokenizer
from cpmrt.weights import hub
from cpmrt.weights.check import check
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.files import read_json
from cpmrt.weights.model_folder import BUNDLED, ModelFolder
from cpmrt.weights.quantised_specs import quantisation_summary

_SIZES = (
    "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size",
    "max_positions", "tie_word_embeddings", "qkv_bias", "qk_norm",
)  # fmt: skip
_SCALES = ("scale_emb", "residual_scale", "logit_divisor")


def report(model: str | None, revision: str | None, hf_overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is known of a checkpoint. `problems` says, a line each, why it will not run.

    Raises CheckpointError, ConfigError where not even config.json can be read.
    """
    path = BUNDLED if model is None else hub.resolve(model, revision=revision, weights=False)
    raw = read_json(path / "config.json")
    problems: list[str] = []
    config = None
    try:
        folder = ModelFolder.open(path, hf_overrides=hf_overrides)
        raw, config = folder.raw_config, folder.config
    except CpmrtError as error:
        problems.append(str(error))
    is_remote = model is not None and not Path(model).expanduser().is_dir()
    tensors, files, quantization = _weights(path, config, problems, may_be_absent=is_remote)
    return {
        "model": str(path),
        "architecture": config.architecture if config else raw.get("architectures", raw.get("model_type")),
        "parameters": _num_parameters(config, tensors),
        "tensor_dtypes": dict(Counter(tensor["dtype"] for tensor in tensors)),
        "dtype": _dtype_label(config, raw),
        "quantization": quantization if config else _quant_method(raw),
        "sizes": {name: getattr(config, name) for name in _SIZES} if config else {},
        "rope": _used(asdict(config.rope)) if config else raw.get("rope_parameters", raw.get("rope_scaling")),
        "sparse": asdict(config.sparse) if config and config.sparse else None,
        "scales": {name: getattr(config, name) for name in _SCALES} if config else {},
        "special_ids": {"bos": config.bos_token_id, "eos": list(config.eos_token_ids)} if config else {},
        "tokenizer": _tokenizer(path, problems),
        "config": raw,
        "files": files,
        "tensors": tensors,
        "problems": problems,
    }


def _weights(
    path: Path, config: ModelConfig | None, problems: list[str], *, may_be_absent: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any] | None]:
    """Tensors, files and quantisation of a checkpoint; whatever is wrong with them goes to `problems`."""
    if may_be_absent and not any(path.glob("*.safetensors")):
        return [], [], _checked_quantization(config, None, problems)
    tensors: list[dict[str, Any]] = []
    files: dict[Path, int] = {}
    quantization = None
    try:
        with Checkpoint.open(path) as checkpoint:
            for name, entry in checkpoint.entries.items():
                shape = list(entry.shape)
                tensors.append({"name": name, "dtype": entry.dtype, "shape": shape, "bytes": entry.nbytes})
                files[entry.path] = entry.path.stat().st_size
            quantization = _checked_quantization(config, checkpoint, problems)
    except CpmrtError as error:
        problems.append(str(error))
    return tensors, [{"name": file.name, "bytes": size} for file, size in files.items()], quantization


def _checked_quantization(
    config: ModelConfig | None, checkpoint: Checkpoint | None, problems: list[str]
) -> dict[str, Any] | None:
    """How the weights are quantised; tensors that are not what they must be go to `problems`."""
    if config is None:
        return None
    settings = config.quantization
    try:
        specs = weight_specs(config, EngineConfig(), checkpoint)
        if checkpoint is not None:
            check(specs, checkpoint)
    except CpmrtError as error:
        problems.append(str(error))
        return {"method": settings.method} if settings is not None else None
    return quantisation_summary(settings, specs)


def _tokenizer(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        tokenizer = Tokenizer.open(path)
        return {
            "vocab_size": tokenizer.vocab_size,
            "bos": tokenizer.bos_token_id,
            "eos": list(tokenizer.eos_token_ids),
            "chat_template": ChatTemplate.open(path) is not None,
        }
    except CpmrtError as error:
        problems.append(str(error))
        return {}


def _num_parameters(config: ModelConfig | None, tensors: Sequence[Mapping[str, Any]]) -> int | None:
    """Of the model that the config describes; else elements stored; None where neither is known."""
    if config is not None:
        return sum(spec.num_elements for spec in tensor_specs(config))
    return sum(prod(tensor["shape"]) for tensor in tensors) or None


def _dtype_label(config: ModelConfig | None, raw: Mapping[str, Any]) -> Any:
    if config is not None:
        return config.dtype.label if config.dtype else None
    return raw.get("dtype", raw.get("torch_dtype"))


def _quant_method(raw: Mapping[str, Any]) -> Any:
    section = raw.get("quantization_config")
    return section.get("quant_method", "unnamed") if isinstance(section, Mapping) else section


def _used(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a rotary embedding that its kind sets."""
    kind = rope["kind"]
    always = {name: rope[name] for name in ("kind", "theta")}
    if kind == "default":
        return always
    plain = asdict(RopeConfig())
    return always | {name: value for name, value in rope.items() if value != plain[name]}

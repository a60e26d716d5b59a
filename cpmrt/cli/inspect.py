"""Show what a checkpoint holds: architecture, sizes, tensors, tokenizer, and what keeps it from running, if anything.

A hub id is looked at without fetching its weights; those that are in the local cache are shown.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from cpmrt import env
from cpmrt.byte_sizes import format_bytes
from cpmrt.cli.arguments import add_model_source, add_options
from cpmrt.cli.output import printable, write, write_json, write_table
from cpmrt.config import EngineConfig, ModelConfig, RopeConfig
from cpmrt.config.layers import GroupedAttention, LightningAttention
from cpmrt.errors import CpmrtError
from cpmrt.models.decoder import tensor_specs
from cpmrt.models.planning import weight_specs
from cpmrt.text import ChatTemplate, Tokenizer
from cpmrt.weights import hub
from cpmrt.weights.check import check
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.model_files import read_json
from cpmrt.weights.model_folder import ModelFolder, check_kind
from cpmrt.weights.quantised_specs import quantisation_summary
from cpmrt.weights.repository import has_weights

_SCALES = ("scale_emb", "residual_scale", "logit_divisor")
_NESTED = ("sizes", "sparse", "scales", "special_ids", "tokenizer", "quantization")


def configure(parser: argparse.ArgumentParser) -> None:
    add_model_source(parser, positional=True)
    add_options(parser, "--hf-overrides")
    parser.add_argument("--tensors", action="store_true", help="list every tensor, not only each kind")
    parser.add_argument("--json", action="store_true", help="write one JSON object, every tensor in it")


def run(args: argparse.Namespace) -> int:
    """Print the report. Raises CheckpointError where there is no config.json to begin with."""
    found = report(args.model, args.revision, args.hf_overrides)
    if args.json:
        write_json(found)
        return 0
    write_table([(name, _shown(name, value)) for name, value in _facts(found).items()])
    if found["files"]:
        write("\n")
        write_table([(file["name"], format_bytes(file["bytes"])) for file in found["files"]], ("file", "size"))
    if found["tensors"]:
        write("\n")
        _write_tensors(found["tensors"], every=args.tensors)
    verdict = "this version can run it" + ("" if found["files"] else " once its weights are fetched")
    lines = [f"will not run: {printable(problem)}" for problem in found["problems"]] or [verdict]
    write("\n" + "\n".join(lines) + "\n")
    return 0


def _facts(found: dict[str, Any]) -> dict[str, Any]:
    """Return the report without its lists, with nested objects on one level."""
    facts: dict[str, Any] = {}
    for name, value in found.items():
        if name in ("files", "tensors", "problems") or (name == "config" and found["sizes"]):
            continue
        if name == "config":
            facts |= {f"config.{key}": entry for key, entry in value.items() if not isinstance(entry, (dict, list))}
        elif name in _NESTED and isinstance(value, dict) and value:
            facts |= {key if name == "sizes" else f"{name}.{key}": entry for key, entry in value.items()}
        else:
            facts[name] = value
    return facts


def _shown(name: str, value: Any) -> str:
    if value is None or value in ({}, []):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shortened(entry)}" for key, entry in value.items())
    if name == "parameters":
        return f"{value:,}"
    return _shortened(value)


def _shortened(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _write_tensors(tensors: list[dict[str, Any]], *, every: bool) -> None:
    if every:
        rows = [(t["name"], t["dtype"], str(t["shape"]), format_bytes(t["bytes"])) for t in tensors]
        write_table(rows, ("tensor", "dtype", "shape", "size"))
        return
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for tensor in tensors:
        parts = ("*" if part.isdigit() else part for part in tensor["name"].split("."))
        key = (".".join(parts), tensor["dtype"], str(tensor["shape"]))
        kinds.setdefault(key, []).append(tensor["bytes"])
    kind_rows = [(str(len(sizes)), *key, format_bytes(sum(sizes))) for key, sizes in kinds.items()]
    write_table(kind_rows, ("count", "tensor", "dtype", "shape", "size"))


def report(model: str | None, revision: str | None, hf_overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return everything known about a checkpoint as plain data; `problems` lists the reasons why it will not run.

    Raises CheckpointError, ConfigError if not even config.json can be read.
    """
    path = hub.resolve(model, revision=revision, weights=False)
    check_kind(path)
    raw = read_json(path / "config.json")
    problems: list[str] = []
    config, sampling = None, None
    try:
        folder = ModelFolder.open(path, hf_overrides=hf_overrides)
        raw, config, sampling = folder.raw_config, folder.config, folder.sampling
    except CpmrtError as error:
        problems.append(str(error))
    is_remote = model is not None and not os.path.isdir(env.expanded(model))
    tensors, files, quantization = _weights(path, config, problems, may_be_absent=is_remote)
    return {
        "model": str(path),
        "architecture": config.architecture if config else raw.get("architectures", raw.get("model_type")),
        "parameters": _num_parameters(config, tensors),
        "tensor_dtypes": dict(Counter(tensor["dtype"] for tensor in tensors)),
        "dtype": _dtype_label(config, raw),
        "quantization": quantization if config else _quant_method(raw),
        "sizes": _sizes(config) if config else {},
        "rope": _used(asdict(config.rope)) if config else raw.get("rope_parameters", raw.get("rope_scaling")),
        "sparse": asdict(config.sparse) if config and config.sparse else None,
        "scales": {name: getattr(config, name) for name in _SCALES} if config else {},
        "special_ids": {"bos": config.bos_token_id, "eos": list(config.eos_token_ids)} if config else {},
        "sampling": asdict(sampling) if sampling else {},
        "tokenizer": _tokenizer(path, problems),
        "config": raw,
        "files": files,
        "tensors": tensors,
        "problems": problems,
    }


def _sizes(config: ModelConfig) -> dict[str, Any]:
    names = ("num_heads", "num_kv_heads", "head_dim", "qkv_bias", "qk_norm")
    attention, mixer = config.of_kind(GroupedAttention), config.layers[0].mixer
    of_mixer = {name: getattr(attention, name) for name in names} if attention else dict(vars(mixer))
    if lightning := config.of_kind(LightningAttention):
        of_mixer["lightning_layers"] = sum(layer.mixer == lightning for layer in config.layers)
        of_mixer |= {f"lightning_{name}": value for name, value in vars(lightning).items()}
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp.intermediate_size,
        **{name: value for name, value in vars(config.mlp).items() if "experts" in name},
        **of_mixer,
        "vocab_size": config.vocab_size,
        "max_positions": config.max_positions,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def _weights(
    path: Path, config: ModelConfig | None, problems: list[str], *, may_be_absent: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any] | None]:
    """Return the tensors, files and quantisation of a checkpoint; what is wrong with them is added to `problems`."""
    if may_be_absent and not has_weights(path):
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
    """Return how the weights are quantised. Tensors that do not fit the config are added to `problems`."""
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
        tokenizer, template = Tokenizer.open(path), ChatTemplate.open(path)
        if template is not None:
            template.check()
        return {
            "vocab_size": tokenizer.vocab_size,
            "bos": tokenizer.bos_token_id,
            "eos": list(tokenizer.eos_token_ids),
            "chat_template": template is not None,
        }
    except CpmrtError as error:
        problems.append(str(error))
        return {}


def _num_parameters(config: ModelConfig | None, tensors: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the number of parameters, by the config or else by the stored tensors; None if neither is known."""
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
    """Return the fields of a rotary embedding that its kind uses: `kind`, `theta`, and those not at their default."""
    kind = rope["kind"]
    always = {name: rope[name] for name in ("kind", "theta")}
    if kind == "default":
        return always
    plain = asdict(RopeConfig())
    return always | {name: value for name, value in rope.items() if value != plain[name]}

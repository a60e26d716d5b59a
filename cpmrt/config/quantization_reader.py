"""Reading quantization_config of a checkpoint: GPTQ, AWQ, AutoRound; compressed-tensors has a file of its own.

As AutoGPTQ, GPTQModel, optimum, AutoAWQ and AutoRound write it. Which layers are quantised is what the tensors of the
files say; the settings say how their words are read, and stand in where only config.json is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmrt.config.compressed_tensors import read_compressed_tensors
from cpmrt.config.fields import Fields
from cpmrt.config.quantization import USE_16_BITS, WeightQuantization, one_of, read_group_size, require_4_bits
from cpmrt.errors import ConfigError, UnsupportedModelError

_AUTO_ROUND = ("auto-round", "auto_round", "intel/auto-round")
# Packing of an AutoRound checkpoint -> tensors as in, zero points stored minus one.
_AUTO_ROUND_PACKING = {
    "auto_round:auto_gptq": ("gptq", True),
    "auto_round:gptq": ("gptq", True),
    "auto_gptq": ("gptq", True),
    "auto_round": ("gptq", False),
    "auto_round:gptqmodel": ("gptq", False),
    "auto_round:auto_awq": ("awq", False),
    "auto_round:awq": ("awq", False),
    "auto_awq": ("awq", False),
}
_GPTQ_FORMATS = {"gptq": True, "gptq_v2": False}
_COMPARED = ("bits", "group_size", "sym", "desc_act", "checkpoint_format")


def read_quantization(
    config: Mapping[str, Any], source: str, quantize_config: Mapping[str, Any] | None = None
) -> WeightQuantization | None:
    """From config.json's object, or from that of a quantize_config.json beside it, as GPTQ tools write.

    `source` is the path of config.json. None: the weights are in 16 bits. Raises ConfigError for a setting that is
    malformed, unknown or contradicts another, UnsupportedModelError for another kind of quantisation.
    """
    name = "quantization_config"
    section = config.get(name)
    if section is None:
        name, section = "compression_config", config.get("compression_config")
    if section is not None and not isinstance(section, Mapping):
        raise Fields(config, source).fail(name, "an object")
    if section is not None and quantize_config is not None:
        _check_same(section, quantize_config, source)
    if section is None:
        if quantize_config is None:
            return None
        section, where = {"quant_method": "gptq", **quantize_config}, _beside(source)
    else:
        where = f"{source}: {name}"
        if name == "compression_config":
            section = {**section, "quant_method": "compressed-tensors"}
    return _parsed(Fields(section, where))


def _parsed(fields: Fields) -> WeightQuantization:
    method = fields.text("quant_method", None) or fields.text("method", None) or fields.text("quant_method")
    if method == "gptq":
        return _gptq(fields)
    if method == "awq":
        return _awq(fields)
    if method in _AUTO_ROUND:
        return _auto_round(fields, method)
    if method == "compressed-tensors":
        return read_compressed_tensors(fields)
    raise UnsupportedModelError(
        f"{fields.source}: weights quantised by {method[:100]!r} are not supported",
        expected="gptq | awq | auto-round | compressed-tensors",
        fix=USE_16_BITS,
    )


def _gptq(fields: Fields) -> WeightQuantization:
    name = "checkpoint_format" if fields.data.get("checkpoint_format") is not None else "format"
    v1_zeros = one_of(fields, name, _GPTQ_FORMATS, "gptq")
    if fields.boolean("is_marlin_format", False):
        raise fields.fail("is_marlin_format", "false")
    if fields.text("pack_dtype", "int32") != "int32":
        raise fields.fail("pack_dtype", "int32")
    require_4_bits(fields, "bits")
    rules = fields.mapping("dynamic")
    overridden = [rule for rule in rules.values() if isinstance(rule, Mapping)]
    return WeightQuantization(
        "gptq",
        "gptq",
        read_group_size(fields, "group_size"),
        symmetric=fields.boolean("sym", True) and all(rule.get("sym", True) for rule in overridden),
        # With static groups the order was only that of the quantisation.
        act_order=fields.boolean("desc_act", False) and not fields.boolean("static_groups", False),
        v1_zeros=v1_zeros,
        lm_head=fields.boolean("lm_head", False),
        only=tuple(fields.names("modules_in_block_to_quantize")),
        overrides=bool(rules),
    )


def _awq(fields: Fields) -> WeightQuantization:
    name = next((n for n in ("version", "checkpoint_format", "format") if fields.data.get(n) is not None), "version")
    if fields.text(name, "gemm").lower() != "gemm":
        raise fields.fail(name, "gemm")
    bits = "w_bit" if "w_bit" in fields.data else "bits"
    group = "q_group_size" if "q_group_size" in fields.data else "group_size"
    require_4_bits(fields, bits)
    return WeightQuantization(
        "awq",
        "awq",
        read_group_size(fields, group),
        symmetric=not fields.boolean("zero_point", not fields.boolean("sym", False)),
        lm_head=fields.boolean("lm_head", False),
        skipped=tuple(fields.names("modules_to_not_convert")),
        overrides=bool(fields.mapping("dynamic")),
    )


def _auto_round(fields: Fields, method: str) -> WeightQuantization:
    name = "packing_format" if fields.data.get("packing_format") is not None else "backend"
    label = fields.text(name, "auto_round").replace("autoround", "auto_round").replace("auto-round", "auto_round")
    # Older versions appended the kernel that they would run: "auto_round:gptq:exllamav2".
    known = max((key for key in _AUTO_ROUND_PACKING if f"{label}:".startswith(f"{key}:")), key=len, default=None)
    kernel = label.removeprefix(known or "").removeprefix(":").split(":")[0]
    if known is None or kernel not in ("", "exllamav2", "triton", "tritonv2", "gemm"):
        raise fields.fail(name, " | ".join(_AUTO_ROUND_PACKING), USE_16_BITS)
    packing, v1_zeros = _AUTO_ROUND_PACKING[known]
    if fields.text("data_type", "int") != "int":
        raise fields.fail("data_type", "int", USE_16_BITS)
    if fields.integer("act_bits", 16) < 16:
        raise fields.fail("act_bits", "16 or nothing", USE_16_BITS)
    require_4_bits(fields, "bits")
    layers = {key: rule for key, rule in fields.mapping("extra_config").items() if isinstance(rule, Mapping)}
    in_16_bits = tuple(key for key, rule in layers.items() if not _is_low(rule.get("bits", 4)))
    return WeightQuantization(
        method,
        packing,
        read_group_size(fields, "group_size"),
        symmetric=fields.boolean("sym", True) and all(rule.get("sym", True) for rule in layers.values()),
        v1_zeros=v1_zeros,
        lm_head="lm_head" in layers and "lm_head" not in in_16_bits,
        skipped=in_16_bits,
        overrides=len(layers) > len(in_16_bits),
    )


def _check_same(section: Mapping[str, Any], beside: Mapping[str, Any], source: str) -> None:
    for name in _COMPARED:
        one, other = section.get(name), beside.get(name)
        if one is not None and other is not None and one != other:
            raise ConfigError(
                f"{_beside(source)}: {name} contradicts config.json",
                expected=repr(one)[:100],
                actual=repr(other)[:100],
                fix="both are of one model: download them again, or remove the wrong one",
            )


def _beside(source: str) -> str:
    return f"{source.removesuffix('config.json')}quantize_config.json"


def _is_low(bits: object) -> bool:
    return isinstance(bits, int) and bits < 16

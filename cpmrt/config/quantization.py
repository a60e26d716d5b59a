"""The settings by which a checkpoint's weights are quantised (4-bit weights, 16-bit activations).

They are read from its quantization_config, as AutoGPTQ, GPTQModel, optimum, AutoAWQ, AutoRound and llm-compressor
(compressed-tensors) write it. The tensors of the files tell which layers are quantised; the settings tell how their
words are read, and stand in for the tensors where only config.json is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cpmrt.config.fields import Fields
from cpmrt.errors import ConfigError, UnsupportedModelError, quoted

SECTIONS = ("quantization_config", "compression_config")
"""The keys of config.json under which tools write these settings."""
TERNARY = "ternary"
"""The method of 16-bit tensors whose values are -1, 0 or 1 times the scale of their group."""
GGUF = "gguf"
"""The method of random weights in blocks of a GGUF type. (A GGUF file itself says what it holds.)"""
GROUP_SIZES = (32, 64, 128)
"""The group sizes of quantised checkpoints beside -1, one group a row."""
_USE_16_BITS = "use the 16-bit checkpoint of this model"
_AUTO_ROUND = ("auto-round", "auto_round", "intel/auto-round")
# Packing of an AutoRound checkpoint -> the format that its tensors have, and whether zero points are stored minus one.
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
_AUTO_ROUND_KERNELS = ("", "exllamav2", "triton", "tritonv2", "gemm")
_GPTQ_FORMATS = {"gptq": True, "gptq_v2": False}
_ACT_ORDERS = {"group": True, "dynamic": True, "weight": False, "static": False}
"""Values of `actorder` in compressed-tensors -> whether the features of a group need not be neighbours."""
_COMPARED = ("bits", "group_size", "sym", "desc_act", "checkpoint_format")


@dataclass(frozen=True)
class WeightQuantization:
    """Settings of a checkpoint with 4-bit weights."""

    method: str
    """The method's name in config.json."""
    packing: str
    """Layout of the tensors: gptq, awq or compressed; ternary for 16-bit ones; or a type of GGUF blocks. (Marlin files
    of CPM.cu carry the settings of gptq.)"""
    group_size: int
    """Input features that share a scale; -1: all of a row."""
    symmetric: bool
    act_order: bool = False
    """Whether the input features of a group need not be neighbours."""
    v1_zeros: bool = False
    """Whether GPTQ zero points are stored minus one."""
    lm_head: bool = False
    wide_head_group: int = 0
    """Columns of a group of an output head in 8 bits (-1: all); 0: a quantised head has as many bits as the layers."""
    skipped: tuple[str, ...] = ()
    """Parts of the names of modules that stay in 16 bits."""
    only: tuple[str, ...] = ()
    """Ends of the names of the only modules that are quantised; empty: all are."""
    overrides: bool = False
    """Whether some layers differ by rules (regular expressions), which are not read: the layers' tensors tell how."""
    bits: int = 4

    def group_of(self, num_columns: int) -> int:
        """Return the columns of a group in a matrix with `num_columns` columns."""
        return num_columns if self.group_size == -1 else self.group_size

    def covers(self, module: str) -> bool:
        """Whether, by these settings alone, `module` (a name as in Hugging Face models) is quantised."""
        if module == "lm_head":
            return self.lm_head
        if any(part in module for part in self.skipped):
            return False
        return not self.only or module.endswith(self.only)


def read_quantization(
    config: Mapping[str, Any], source: str, quantize_config: Mapping[str, Any] | None = None
) -> WeightQuantization | None:
    """Return the settings in config.json's object, else in that of a quantize_config.json, which GPTQ tools write.

    None means weights in 16 bits. `source` is the path of config.json. Raises ConfigError for a setting that is
    malformed, unknown or contradicts another, UnsupportedModelError for another kind of quantisation.
    """
    name = Fields(config, source).first_of(*SECTIONS)
    section, beside = config.get(name), source.replace("config.json", "quantize_config.json")
    if section is None:
        if quantize_config is None:
            return None
        return _read(Fields({"quant_method": "gptq", **quantize_config}, beside))
    if not isinstance(section, Mapping):
        raise Fields(config, source).fail(name, "an object")
    _check_same(section, quantize_config or {}, beside)
    if name == "compression_config":
        section = {**section, "quant_method": "compressed-tensors"}
    return _read(Fields(section, f"{source}: {name}"))


def _check_same(section: Mapping[str, Any], quantize_config: Mapping[str, Any], beside: str) -> None:
    for name in _COMPARED:
        one, other = section.get(name), quantize_config.get(name)
        if one is not None and other is not None and one != other:
            raise ConfigError(
                f"{beside}: {name} contradicts config.json",
                expected=quoted(one),
                actual=quoted(other),
                fix="both are of one model: download them again, or remove the wrong one",
            )


def _read(fields: Fields) -> WeightQuantization:
    method = fields.text("quant_method", None) or fields.text("method", None) or fields.text("quant_method")
    if method == GGUF:
        return WeightQuantization(GGUF, fields.text("type"), -1, symmetric=False)
    if method == TERNARY:
        return WeightQuantization(TERNARY, TERNARY, _group_size(fields, "group_size"), symmetric=True, bits=2)
    if method == "gptq":
        return _gptq(fields)
    if method == "awq":
        return _awq(fields)
    if method in _AUTO_ROUND:
        return _auto_round(fields, method)
    if method == "compressed-tensors":
        return _compressed_tensors(fields)
    raise UnsupportedModelError(
        f"{fields.source}: weights quantised by {method[:100]!r} are not supported",
        expected="gptq | awq | auto-round | compressed-tensors",
        fix=_USE_16_BITS,
    )


def _gptq(fields: Fields) -> WeightQuantization:
    v1_zeros = _one_of(fields, fields.first_of("checkpoint_format", "format"), _GPTQ_FORMATS, "gptq")
    if fields.boolean("is_marlin_format", False):
        raise fields.fail("is_marlin_format", "false")
    if fields.text("pack_dtype", "int32") != "int32":
        raise fields.fail("pack_dtype", "int32")
    _require_4_bits(fields, "bits")
    rules = fields.mapping("dynamic")
    overridden = [rule for rule in rules.values() if isinstance(rule, Mapping)]
    return WeightQuantization(
        "gptq",
        "gptq",
        _group_size(fields, "group_size"),
        symmetric=fields.boolean("sym", True) and all(rule.get("sym", True) for rule in overridden),
        # With static groups desc_act was only the order in which columns were quantised.
        act_order=fields.boolean("desc_act", False) and not fields.boolean("static_groups", False),
        v1_zeros=v1_zeros,
        lm_head=fields.boolean("lm_head", False),
        wide_head_group=_wide_head_group(rules, fields.source),
        skipped=tuple(_left_out(rules)),
        only=tuple(fields.names("modules_in_block_to_quantize")),
        overrides=bool(rules),
    )


def _left_out(rules: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of the names of modules that rules such as "-:.*o_gate" leave in 16 bits, except the head, which
    has a field of its own. Other regular expressions are not read: the tensors tell."""
    for rule in rules:
        found = re.fullmatch(r"-:\.\*([\w.]+?)(?:\.\*|\$)?", rule.replace("\\.", "."))
        if found and found[1] != "lm_head":
            yield found[1]


def _wide_head_group(rules: Mapping[str, Any], source: str) -> int:
    """Return the group size of the rule that GPTQModel adds for a quantised head, in 8 bits; 0 without one."""
    rule = rules.get("lm_head")
    if not isinstance(rule, Mapping) or rule.get("bits") != 8:
        return 0
    return _group_size(Fields(rule, f"{source}: dynamic: lm_head"), "group_size")


def _awq(fields: Fields) -> WeightQuantization:
    name = fields.first_of("version", "checkpoint_format", "format")
    if fields.text(name, "gemm").lower() != "gemm":
        raise fields.fail(name, "gemm")
    _require_4_bits(fields, fields.first_of("w_bit", "bits"))
    return WeightQuantization(
        "awq",
        "awq",
        _group_size(fields, fields.first_of("q_group_size", "group_size")),
        symmetric=not fields.boolean("zero_point", not fields.boolean("sym", False)),
        lm_head=fields.boolean("lm_head", False),
        skipped=tuple(fields.names("modules_to_not_convert")),
        overrides=bool(fields.mapping("dynamic")),
    )


def _auto_round(fields: Fields, method: str) -> WeightQuantization:
    name = fields.first_of("packing_format", "backend")
    label = fields.text(name, "auto_round").replace("autoround", "auto_round").replace("auto-round", "auto_round")
    # Older versions appended the kernel that they would run: "auto_round:gptq:exllamav2".
    known = max((key for key in _AUTO_ROUND_PACKING if f"{label}:".startswith(f"{key}:")), key=len, default="")
    if not known or label.removeprefix(known).removeprefix(":").split(":")[0] not in _AUTO_ROUND_KERNELS:
        raise fields.fail(name, " | ".join(_AUTO_ROUND_PACKING), _USE_16_BITS)
    packing, v1_zeros = _AUTO_ROUND_PACKING[known]
    if fields.text("data_type", "int") != "int":
        raise fields.fail("data_type", "int", _USE_16_BITS)
    if fields.integer("act_bits", 16) < 16:
        raise fields.fail("act_bits", "16 or nothing", _USE_16_BITS)
    _require_4_bits(fields, "bits")
    layers = {key: rule for key, rule in fields.mapping("extra_config").items() if isinstance(rule, Mapping)}
    in_16_bits = tuple(key for key, rule in layers.items() if not _is_low(rule.get("bits", 4)))
    return WeightQuantization(
        method,
        packing,
        _group_size(fields, "group_size"),
        symmetric=fields.boolean("sym", True) and all(rule.get("sym", True) for rule in layers.values()),
        v1_zeros=v1_zeros,
        lm_head="lm_head" in layers and "lm_head" not in in_16_bits,
        skipped=in_16_bits,
        overrides=len(layers) > len(in_16_bits),
    )


def _compressed_tensors(fields: Fields) -> WeightQuantization:
    """Read the `pack-quantized` W4A16 of llm-compressor; raises ConfigError for any other scheme."""
    if isinstance(fields.data.get("quantization_config"), Mapping):
        fields = Fields({**fields.data, **fields.data["quantization_config"]}, fields.source)
    groups = list(_config_groups(fields))
    for name in ("kv_cache_scheme", "transform_config"):
        if fields.data.get(name):
            raise fields.fail(name, "nothing", _USE_16_BITS)
    if fields.mapping("sparsity_config").get("format", "dense") != "dense":
        raise fields.fail("sparsity_config", "a dense format", _USE_16_BITS)
    weights = [_scheme(fields, group) for group in groups]
    ignored = fields.names("ignore")
    plain = tuple(name for name in ignored if not name.startswith("re:"))
    sizes = [_scheme_group_size(scheme) for scheme in weights]
    covers_linear = any("Linear" in group.names("targets") for group in groups)
    return WeightQuantization(
        "compressed-tensors",
        "compressed",
        sizes[0],
        symmetric=all(scheme.boolean("symmetric", True) for scheme in weights),
        act_order=any(_act_order(scheme) for scheme in weights),
        lm_head=not any("lm_head" in name for name in ignored) and covers_linear,
        skipped=plain,
        overrides=len(set(sizes)) > 1 or len(plain) < sum("lm_head" not in name for name in ignored),
    )


def _config_groups(fields: Fields) -> Iterator[Fields]:
    groups = fields.mapping("config_groups")
    if not groups:
        raise fields.fail("config_groups", "an object with at least one group")
    for name, group in groups.items():
        where = f"{fields.source}.config_groups.{name[:100]}"
        if not isinstance(group, Mapping):
            raise ConfigError(where, expected="an object", actual=quoted(group))
        yield Fields(group, where)


def _scheme(fields: Fields, group: Fields) -> Fields:
    """Return the scheme of the weights of one config group, checked except for its group size."""
    chosen = group if group.data.get("format") is not None else fields
    if chosen.text("format") != "pack-quantized":
        raise chosen.fail("format", "pack-quantized", _USE_16_BITS)
    for name in ("input_activations", "output_activations"):
        if group.data.get(name) is not None:
            raise group.fail(name, "nothing: activations stay in 16 bits", _USE_16_BITS)
    if not isinstance(group.data.get("weights"), Mapping):
        raise group.fail("weights", "an object")
    weights = Fields(group.data["weights"], f"{group.source}.weights")
    _require_4_bits(weights, "num_bits")
    if weights.text("type", "int") != "int":
        raise weights.fail("type", "int", _USE_16_BITS)
    if weights.boolean("dynamic", False):
        raise weights.fail("dynamic", "false")
    return weights


def _scheme_group_size(weights: Fields) -> int:
    is_whole = weights.data.get("group_size") in (None, -1)
    strategy = weights.text("strategy", "channel" if is_whole else "group")
    if strategy == "channel":
        if not is_whole:
            raise weights.fail("group_size", "nothing, as strategy is channel")
        return -1
    if strategy != "group":
        raise weights.fail("strategy", "group | channel", _USE_16_BITS)
    return _group_size(weights, "group_size")


def _act_order(weights: Fields) -> bool:
    value = weights.data.get("actorder")
    return value if isinstance(value, bool) else _one_of(weights, "actorder", _ACT_ORDERS, "static")


def _one_of(fields: Fields, name: str, values: Mapping[str, bool], default: str) -> bool:
    """Return the value that the text of a field stands for. Raises ConfigError for a text that is not in `values`."""
    value = fields.text(name, default)
    if value not in values:
        raise fields.fail(name, " | ".join(values), _USE_16_BITS)
    return values[value]


def _require_4_bits(fields: Fields, name: str) -> None:
    """Raise ConfigError unless the field `name` is 4."""
    if fields.integer(name) != 4:
        raise fields.fail(name, "4", _USE_16_BITS)


def _group_size(fields: Fields, name: str) -> int:
    """Return the group size in a field: -1, 32, 64 or 128. Raises ConfigError for another."""
    size = fields.integer(name, low=-1)
    if size not in (-1, *GROUP_SIZES):
        raise fields.fail(name, f"-1 | {' | '.join(map(str, GROUP_SIZES))}", _USE_16_BITS)
    return int(size)


def _is_low(bits: object) -> bool:
    return isinstance(bits, int) and bits < 16

"""Reading quantization_config of compressed-tensors checkpoints: `pack-quantized` W4A16 as llm-compressor writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cpmrt.config.fields import Fields
from cpmrt.config.quantization import USE_16_BITS, WeightQuantization, one_of, read_group_size, require_4_bits
from cpmrt.errors import ConfigError


def read_compressed_tensors(fields: Fields) -> WeightQuantization:
    """From the section of config.json. Raises ConfigError for anything but 4-bit weights of 16-bit activations."""
    if isinstance(fields.data.get("quantization_config"), Mapping):
        fields = Fields({**fields.data, **fields.data["quantization_config"]}, fields.source)
    groups = [Fields(*row) for row in _config_groups(fields)]
    for name in ("kv_cache_scheme", "transform_config"):
        if fields.data.get(name):
            raise fields.fail(name, "nothing", USE_16_BITS)
    if fields.mapping("sparsity_config").get("format", "dense") != "dense":
        raise fields.fail("sparsity_config", "a dense format", USE_16_BITS)
    weights = [_weights(fields, group) for group in groups]
    ignored = fields.names("ignore")
    plain = tuple(name for name in ignored if not name.startswith("re:"))
    sizes = {_group_size(scheme) for scheme in weights}
    return WeightQuantization(
        "compressed-tensors",
        "compressed",
        _group_size(weights[0]),
        symmetric=all(scheme.boolean("symmetric", True) for scheme in weights),
        act_order=any(_actorder(scheme) for scheme in weights),
        lm_head=not any("lm_head" in name for name in ignored) and _targets_every_linear(groups),
        skipped=plain,
        overrides=len(sizes) > 1 or len(plain) < sum("lm_head" not in name for name in ignored),
    )


def _config_groups(fields: Fields) -> Iterator[tuple[Mapping[str, Any], str]]:
    groups = fields.mapping("config_groups")
    if not groups:
        raise fields.fail("config_groups", "an object with at least one group")
    for name, group in groups.items():
        where = f"{fields.source}.config_groups.{name[:100]}"
        if not isinstance(group, Mapping):
            raise ConfigError(where, expected="an object", actual=repr(group)[:200])
        yield group, where


def _weights(fields: Fields, group: Fields) -> Fields:
    """The weights of one group, all but its size checked."""
    chosen = group if group.data.get("format") is not None else fields
    if chosen.text("format") != "pack-quantized":
        raise chosen.fail("format", "pack-quantized", USE_16_BITS)
    for name in ("input_activations", "output_activations"):
        if group.data.get(name) is not None:
            raise group.fail(name, "nothing: activations stay in 16 bits", USE_16_BITS)
    if not isinstance(group.data.get("weights"), Mapping):
        raise group.fail("weights", "an object")
    weights = Fields(group.data["weights"], f"{group.source}.weights")
    require_4_bits(weights, "num_bits")
    if weights.text("type", "int") != "int":
        raise weights.fail("type", "int", USE_16_BITS)
    if weights.boolean("dynamic", False):
        raise weights.fail("dynamic", "false")
    return weights


def _group_size(weights: Fields) -> int:
    strategy = weights.text("strategy", "channel" if weights.data.get("group_size") in (None, -1) else "group")
    if strategy == "channel":
        if weights.data.get("group_size") not in (None, -1):
            raise weights.fail("group_size", "nothing, as strategy is channel")
        return -1
    if strategy != "group":
        raise weights.fail("strategy", "group | channel", USE_16_BITS)
    return read_group_size(weights, "group_size")


def _actorder(weights: Fields) -> bool:
    """Whether groups are of features that are not neighbours ("weight" and "static" keep them neighbours)."""
    value = weights.data.get("actorder")
    if isinstance(value, bool):
        return value
    kinds = {"group": True, "dynamic": True, "weight": False, "static": False}
    return one_of(weights, "actorder", kinds, "static")


def _targets_every_linear(groups: list[Fields]) -> bool:
    return any("Linear" in group.names("targets") for group in groups)

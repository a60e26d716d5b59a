"""How a checkpoint's weights are quantised: 4-bit weights, 16-bit activations (W4A16)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cpmrt.config.fields import Fields

GROUP_SIZES = (32, 64, 128)
"""Beside -1, one group a row."""
USE_16_BITS = "use the 16-bit checkpoint of this model"


@dataclass(frozen=True)
class WeightQuantization:
    """Settings of a W4A16 checkpoint."""

    method: str
    """What config.json calls it."""
    packing: str
    """Layout of the tensors: gptq, awq or compressed. (CPM.cu's Marlin files carry the settings of gptq.)"""
    group_size: int
    """Input features that share a scale; -1: all of a row."""
    symmetric: bool
    act_order: bool = False
    """Groups may be of input features that are not neighbours."""
    v1_zeros: bool = False
    """GPTQ zero points are stored minus one."""
    lm_head: bool = False
    skipped: tuple[str, ...] = ()
    """Parts of module names that stay in 16 bits."""
    only: tuple[str, ...] = ()
    """Ends of module names, the only ones that are quantised; empty: all."""
    overrides: bool = False
    """Some layers differ by rules (regular expressions) that are not read: their tensors tell."""
    bits: int = 4

    def group_of(self, num_columns: int) -> int:
        """Columns of a group of a matrix with so many."""
        return num_columns if self.group_size == -1 else self.group_size

    def covers(self, module: str) -> bool:
        """Whether, by these settings alone, `module` (a name as in Hugging Face models) is quantised."""
        if module == "lm_head":
            return self.lm_head
        if any(part in module for part in self.skipped):
            return False
        return not self.only or module.endswith(self.only)


def one_of(fields: Fields, name: str, values: Mapping[str, bool], default: str) -> bool:
    """What the text of a field stands for. Raises ConfigError for one that is not among `values`."""
    value = fields.text(name, default)
    if value not in values:
        raise fields.fail(name, " | ".join(values), USE_16_BITS)
    return values[value]


def require_4_bits(fields: Fields, name: str) -> None:
    """Raise ConfigError for any other number of bits."""
    if fields.integer(name) != 4:
        raise fields.fail(name, "4", USE_16_BITS)


def read_group_size(fields: Fields, name: str) -> int:
    """-1, 32, 64 or 128. Raises ConfigError."""
    size = fields.integer(name, low=-1)
    if size not in (-1, *GROUP_SIZES):
        raise fields.fail(name, f"-1 | {' | '.join(map(str, GROUP_SIZES))}", USE_16_BITS)
    return int(size)

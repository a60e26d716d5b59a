"""Kinds of mlp: one module each, found by the type of their config."""

from cpmrt.config.layers import ExpertsMlp, GatedMlp, MlpConfig
from cpmrt.models.layers import Mlp
from cpmrt.models.mlps import experts, gated

MLPS: dict[type[MlpConfig], Mlp] = {GatedMlp: gated, ExpertsMlp: experts}

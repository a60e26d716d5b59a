"""Kinds of mlp: one module each, found by the type of its config and imported when a model has the kind."""

from collections.abc import Callable

from cpmrt.config.layers import ExpertsMlp, GatedMlp, MlpConfig
from cpmrt.models.layers import Mlp


def _gated() -> Mlp:
    from cpmrt.models.mlps import gated

    return gated


def _experts() -> Mlp:
    from cpmrt.models.mlps import experts

    return experts


MLPS: dict[type[MlpConfig], Callable[[], Mlp]] = {GatedMlp: _gated, ExpertsMlp: _experts}


def mlp_of(config: MlpConfig) -> Mlp:
    """Return the module of this kind of mlp."""
    return MLPS[type(config)]()

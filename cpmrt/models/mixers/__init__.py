"""Kinds of token mixing: one module each, found by the type of its config and imported when a model has the kind."""

from collections.abc import Callable

from cpmrt.config.layers import GroupedAttention, LatentAttention, LightningAttention, MixerConfig
from cpmrt.models.layers import Mixer, RestoringMixer


def _grouped() -> Mixer:
    from cpmrt.models.mixers import grouped

    return grouped


def _latent() -> Mixer:
    from cpmrt.models.mixers import latent

    return latent


def _lightning() -> RestoringMixer:
    from cpmrt.models.mixers import lightning

    return lightning


MIXERS: dict[type[MixerConfig], Callable[[], Mixer]] = {
    GroupedAttention: _grouped,
    LatentAttention: _latent,
    LightningAttention: _lightning,
}
RESTORING: dict[type[MixerConfig], Callable[[], RestoringMixer]] = {LightningAttention: _lightning}
"""The kinds that have caches of `on_accept` "restore"."""


def mixer_of(config: MixerConfig) -> Mixer:
    """Return the module of this kind of mixer."""
    return MIXERS[type(config)]()

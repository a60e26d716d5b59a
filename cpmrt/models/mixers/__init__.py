"""Kinds of token mixing: one module each, found by the type of their config."""

from cpmrt.config.layers import GroupedAttention, LatentAttention, LightningAttention, MixerConfig
from cpmrt.models.layers import Mixer
from cpmrt.models.mixers import grouped, latent, lightning

MIXERS: dict[type[MixerConfig], Mixer] = {
    GroupedAttention: grouped,
    LatentAttention: latent,
    LightningAttention: lightning,
}

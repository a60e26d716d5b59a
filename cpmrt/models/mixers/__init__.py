"""Kinds of token mixing: one module each, found by the type of their config."""

from cpmrt.config.layers import GroupedAttention, LatentAttention, MixerConfig
from cpmrt.models.layers import Mixer
from cpmrt.models.mixers import grouped, latent

MIXERS: dict[type[MixerConfig], Mixer] = {GroupedAttention: grouped, LatentAttention: latent}

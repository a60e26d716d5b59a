"""Kinds of token mixing: one module each, found by the type of their config."""

from cpmrt.config.layers import GroupedAttention, MixerConfig
from cpmrt.models.layers import Mixer
from cpmrt.models.mixers import grouped

MIXERS: dict[type[MixerConfig], Mixer] = {GroupedAttention: grouped}

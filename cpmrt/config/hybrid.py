"""The mixers of a model whose config.json names the kind of each layer (`mixer_types`): MiniCPM-SALA.

"minicpm4" is grouped attention, block-sparse where there is a `sparse_config`; "lightning-attn" is lightning attention.
Defaults are those of the model's configuration class. A field of either kind that is not known here is refused.
"""

from __future__ import annotations

from dataclasses import replace

from cpmrt.config.fields import Fields
from cpmrt.config.layers import GroupedAttention, LightningAttention, MixerConfig
from cpmrt.errors import UnsupportedModelError, quoted

_ATTENTION, _LIGHTNING = ("minicpm4",), ("lightning-attn", "lightning")
_SCALE = "1/sqrt(d)"
_KNOWN = (
    "lightning_nh", "lightning_nkv", "lightning_head_dim", "lightning_scale", "lightning_use_rope", "attn_use_rope",
    "attn_use_output_gate", "use_output_gate", "use_output_norm",
)  # fmt: skip
_OWN_FIELDS = ("lightning_", "attn_use_", "use_output_")


def read_mixers(fields: Fields, attention: MixerConfig, num_layers: int) -> tuple[MixerConfig, ...]:
    """Return the mixer of each layer; `attention` is the one read from the fields that all architectures share.

    Raises ConfigError for malformed fields, UnsupportedModelError for kinds and settings that are not implemented.
    """
    assert isinstance(attention, GroupedAttention)
    for name, value in fields.data.items():
        if name.startswith(_OWN_FIELDS) and name not in _KNOWN and value not in (None, False):
            raise UnsupportedModelError(f"{fields.source}: {name} is not known", actual=quoted(value))
    attends = replace(
        attention,
        rope=fields.boolean("attn_use_rope", True),
        output_gate=fields.boolean("attn_use_output_gate", False),
    )
    kinds: dict[str, MixerConfig] = dict.fromkeys(_ATTENTION, attends)
    names = fields.data.get("mixer_types")
    if not isinstance(names, list) or len(names) != num_layers or not all(isinstance(name, str) for name in names):
        raise fields.fail("mixer_types", f"a list of {num_layers} names")
    if any(name in _LIGHTNING for name in names):
        kinds |= dict.fromkeys(_LIGHTNING, _lightning(fields, attention))
    for name in names:
        if name not in kinds:
            known = " | ".join((*_ATTENTION, *_LIGHTNING))
            raise UnsupportedModelError(f"{fields.source}: mixer_types", expected=known, actual=quoted(name))
    return tuple(kinds[name] for name in names)


def _lightning(fields: Fields, attention: GroupedAttention) -> LightningAttention:
    heads = fields.integer("lightning_nh", attention.num_heads)
    for name, value, expected in (
        ("lightning_nkv", fields.integer("lightning_nkv", heads), heads),
        ("attention_bias", fields.boolean("attention_bias", False), False),
    ):
        if value != expected:
            what = f"{fields.source}: {name} of lightning attention"
            raise UnsupportedModelError(what, expected=str(expected).lower(), actual=str(value).lower())
    scale = fields.text("lightning_scale", _SCALE)
    if scale != _SCALE:
        raise UnsupportedModelError(f"{fields.source}: lightning_scale", expected=_SCALE, actual=quoted(scale))
    head_dim = fields.integer("lightning_head_dim", attention.head_dim)
    if head_dim % 2:
        raise fields.fail("lightning_head_dim", "an even number")
    if head_dim != attention.head_dim and fields.mapping("rope_scaling"):
        what = f"{fields.source}: lightning_head_dim beside a rope_scaling"
        raise UnsupportedModelError(what, expected=f"head_dim ({attention.head_dim})", actual=head_dim)
    return LightningAttention(
        num_heads=heads,
        head_dim=head_dim,
        qk_norm=fields.boolean("qk_norm", True),
        rope=fields.boolean("lightning_use_rope", True),
        output_norm=fields.boolean("use_output_norm", False),
        output_gate=fields.boolean("use_output_gate", False),
    )

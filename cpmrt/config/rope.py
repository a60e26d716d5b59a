"""Rotary embedding settings, read from every spelling that checkpoints use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cpmrt.config.fields import REQUIRED, Fields
from cpmrt.errors import ConfigError, UnsupportedModelError, quoted

_THETAS = 1.001, 1e12
"""The range of `rope_theta`; below it the pairs would hardly differ in how fast they turn."""
_FACTORS = 1.0, 1e6
"""The range of the factor by which the context becomes longer; transformers also takes factors below 1, and warns."""
_WEIGHTS = 0.01, 100.0
"""The range of the factor of cos and sin (`attention_factor`), and of the factors of the logarithm in it (`mscale`)."""
_TURNS = 1e-3, 1e6
"""The range of the two numbers of turns in an original context between which frequencies are blended."""
_DIVISORS = 0.01, 1e6
"""The range of LongRoPE's factors, by which single frequencies are divided."""
KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_ORIGINAL = "original_max_position_embeddings"
_OF_KINDS = ("factor", "short_factor", "long_factor")
"""Fields that have a meaning only where a kind is named."""
_ALIASES = {"su": "longrope", "ntk": "dynamic"}


@dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding; fields that a kind does not use keep their defaults.

    The formulas are in `cpmrt/models/rope.py`. `attention_factor` None means the kind's own rule.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float | None = None
    original_max_positions: int = 0
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    list_by: str = "context"
    """The length that chooses between LongRoPE's two lists: "context", the context that was asked for, or "length",
    that of the text so far (`models.rope`)."""

    def mixes_lists(self, limit: int) -> bool:
        """Whether texts of at most `limit` tokens can be on both sides of the length where LongRoPE's lists change."""
        return self.short_factor != self.long_factor and limit > self.original_max_positions

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str, head_dim: int, max_positions: int) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_scaling` + `rope_theta` (transformers 4).

        Where both are there, as after an override, `rope_scaling` counts, but a theta that it does not name is taken
        from beside it or from `rope_parameters`. The kind may be called `rope_type` or `type`. Raises ConfigError,
        UnsupportedModelError.
        """
        outer = Fields(config, source)
        section = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        for name in ("rope_scaling", "rope_parameters"):
            if config.get(name) is not None and not isinstance(config[name], Mapping):
                raise outer.fail(name, "an object or null")
        scaling, parameters = config.get(section) or {}, config.get("rope_parameters") or {}
        if any(isinstance(value, Mapping) for value in scaling.values()):
            raise UnsupportedModelError(f"{source}: {section}: one rotary embedding per layer type is not supported")
        fields = Fields(scaling, f"{source}: {section}")
        kind = _kind(fields)
        places = (fields, outer, Fields(parameters, f"{source}: rope_parameters"))
        thetas = (place.number("rope_theta", None, *_THETAS) for place in places)
        theta = next((theta for theta in thetas if theta is not None), 10000.0)
        partial = fields.number("partial_rotary_factor", None) or outer.number("partial_rotary_factor", 1.0)
        if partial != 1.0:
            raise UnsupportedModelError(
                f"{source}: partial_rotary_factor", expected="1.0", actual=partial
            )
        # transformers prefers the outer key, which Phi-style configs carry.
        place = outer if outer.data.get(_ORIGINAL) is not None else fields
        original = place.integer(_ORIGINAL, max_positions, low=2 if kind == "longrope" else 1)
        own = _READERS[kind](fields, head_dim)
        if kind == "longrope" and original < 2:
            raise outer.fail("max_position_embeddings", f"at least 2, or an {_ORIGINAL}")
        if kind == "yarn" and own["factor"] is None and max_positions < original:
            raise place.fail(_ORIGINAL, f"at most max_position_embeddings ({max_positions}), or a factor")
        return cls(kind=kind, theta=theta, original_max_positions=original, **own)


def _kind(fields: Fields) -> str:
    named = [fields.text(key, None) for key in ("rope_type", "type")]
    names = {_ALIASES.get(name, name) for name in named if name is not None}
    if len(names) > 1:
        raise ConfigError(f"{fields.source}: rope_type and type", expected="the same kind", actual=named)
    if not names and any(fields.data.get(name) is not None for name in _OF_KINDS):
        raise ConfigError(f"{fields.source}: rope_type", expected=" | ".join(KINDS), actual="nothing")
    kind: str = names.pop() if names else "default"
    if kind not in KINDS:
        raise UnsupportedModelError(f"{fields.source}: rope_type", expected=" | ".join(KINDS), actual=quoted(kind))
    return kind


def _no_fields(fields: Fields, head_dim: int) -> dict[str, Any]:
    return {}


def _factor_only(fields: Fields, head_dim: int) -> dict[str, Any]:
    return {"factor": fields.number("factor", low=_FACTORS[0], high=_FACTORS[1])}


def _dynamic(fields: Fields, head_dim: int) -> dict[str, Any]:
    if head_dim < 4:
        raise ConfigError(f"{fields.source}: dynamic scaling", expected="a head_dim of at least 4", actual=head_dim)
    return _factor_only(fields, head_dim)


def _llama3(fields: Fields, head_dim: int) -> dict[str, Any]:
    low, high = (fields.number(name, REQUIRED, *_TURNS) for name in ("low_freq_factor", "high_freq_factor"))
    if not low < high:
        raise fields.fail("high_freq_factor", f"more than low_freq_factor ({low})")
    return {**_factor_only(fields, head_dim), "low_freq_factor": low, "high_freq_factor": high}


def _yarn(fields: Fields, head_dim: int) -> dict[str, Any]:
    return {
        "factor": fields.number("factor", None, *_FACTORS),
        "attention_factor": fields.number("attention_factor", None, *_WEIGHTS),
        "beta_fast": fields.number("beta_fast", 32.0, *_TURNS),
        "beta_slow": fields.number("beta_slow", 1.0, *_TURNS),
        "mscale": fields.number("mscale", None, *_WEIGHTS),
        "mscale_all_dim": fields.number("mscale_all_dim", None, *_WEIGHTS),
        "truncate": fields.boolean("truncate", True),
    }


def _longrope(fields: Fields, head_dim: int) -> dict[str, Any]:
    list_by = fields.text("list_by", "context")
    if list_by not in ("context", "length"):
        raise fields.fail("list_by", "context | length")
    return {
        "factor": fields.number("factor", None, *_FACTORS),
        "attention_factor": fields.number("attention_factor", None, *_WEIGHTS),
        "short_factor": fields.numbers("short_factor", head_dim // 2, *_DIVISORS),
        "long_factor": fields.numbers("long_factor", head_dim // 2, *_DIVISORS),
        "list_by": list_by,
    }


_READERS = {
    "default": _no_fields,
    "linear": _factor_only,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}

"""What tensor names say: leftovers, marks of quantised formats; and how they are quoted in messages."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from reprlib import Repr

LEFTOVERS = ("*.rotary_emb.*", "lm_head.weight")
"""Patterns of tensors that may be present and unused.

RoPE tables (`model.layers.0.self_attn.rotary_emb.inv_freq`) were saved by old transformers; here they are
computed. `lm_head.weight` is a leftover only where no spec asks for it: the head is tied to the embedding.
"""

DRAFT_LEFTOVERS = (
    "*embed_tokens.weight", "lm_head.weight", "norm.weight", "model.norm.weight", "t2d", "d2t", "token_id_remap",
)  # fmt: skip
"""The same of an EAGLE draft, which uses the target's embedding, and mostly its norm and head."""

_QUANTISED = (
    ("*.weight_packed", "compressed-tensors"),
    ("*.g_idx", "GPTQ"),
    ("*.qzeros", "GPTQ or AWQ"),
    ("*.qweight", "GPTQ, AWQ or Marlin"),
    ("*.scales", "GPTQ, AWQ or Marlin"),
    ("*.quant_state.*", "bitsandbytes"),
    ("*.absmax", "bitsandbytes"),
    ("*.SCB", "bitsandbytes"),
    ("*.weight_scale_inv", "block FP8"),
    ("*.weight_scale", "FP8 or compressed-tensors"),
    ("*.codebooks", "AQLM"),
)

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 100
_SHORT.maxlist = 8


def quoted(value: object) -> str:
    """A name or value from a file as a short printable piece of a message: escaped, cut where it is long."""
    return _SHORT.repr(value)


def listed(items: Sequence[str], limit: int = 8) -> str:
    """The first `limit` items, then how many more there are."""
    more = len(items) - limit
    return ", ".join(items[:limit]) + (f" and {more} more" if more > 0 else "")


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether `name` fits one of the shell-style patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def quantised_format(names: Sequence[str]) -> str | None:
    """The quantisation that the tensor names betray (most telling suffix first), or None."""
    for pattern, label in _QUANTISED:
        if any(fnmatchcase(name, pattern) for name in names):
            return label
    return None

"""Operand shapes and tolerances of every op, in one table.

Shape letters: T rows of the step, R rows that need logits, C hidden, F intermediate, H query heads, K KV heads,
D head dim, V vocabulary, P pages, S tokens of a page (64), M positions of the rotary table, B slots,
L layers, N pages of a slot's block table, W blocks that a row chooses (sparse attention), A and E widths of other rows,
I columns and O rows of a product's weight, X columns of its input, of which it may read only the first I. "HD" is H
times D, "AE" A plus E, "AF" A times F. In a mixture of experts A are the experts of a row, E all experts. In latent
attention A and C are the elements of the two latents, R the rotated elements of a key, N the other elements of a head's
key, and U the elements of a head's value.

A tolerance is the largest allowed ‖out - oracle‖ / ‖oracle‖ for one op with operands of that storage type. It allows
another order of summation and, below float32, results on either side of a rounding tie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from cpmrt.dtypes import DType

_TOLERANCE = {DType.FLOAT32: 1e-5, DType.FLOAT16: 2e-3, DType.BFLOAT16: 1e-2}


@dataclass(frozen=True)
class OpSpec:
    """Operand name -> dimensions as letters separated by spaces, outputs first."""

    operands: dict[str, str]
    tolerance: dict[DType, float] = field(default_factory=lambda: dict(_TOLERANCE))


_LATENT_ATTENTION = {
    "out": "T HU",
    "q": "T HNR",
    "latents": "T ACR",
    "q_norm": "A",
    "kv_norm": "C",
    "pages": "P 1 S CR",
    "up": "H NU C",
    "rope": "2 M R/2",
    "positions": "T",
    "slots": "T",
    "locations": "T",
    "block_tables": "B N",
    "tree_masks": "T",
    "tree_base": "T",
}

_LIGHTNING = {
    "out": "T HD",
    "qkv": "T 3HD",
    "states": "B H D D",
    "chain": "J 2HD",
    "q_norm": "D",
    "k_norm": "D",
    "rope": "2 M D/2",
    "decay": "H 65",
    "positions": "T",
    "slots": "T",
}
"""The operands of lightning attention: J are the rows of a chain of drafts, "3HD" is 3 times H times D."""

OPS = {
    "embed": OpSpec({"out": "T C", "token_ids": "T", "table": "V C"}),
    "qkv": OpSpec(
        {
            "q": "T HD",
            "k": "P K S D",
            "v": "P K S D",
            "x": "T C",
            "norm": "C",
            "weight": "QKV C",
            "bias": "QKV",
            "q_norm": "D",
            "k_norm": "D",
            "rope": "2 M D/2",
            "positions": "T",
            "locations": "T",
            "slots": "T",
            "block_tables": "B N",
            "k1": "P K 4 D",
            "k2": "P K D",
            "q_nope": "T HD",
            "nope": "P K S D",
        }
    ),
    "lightning_decode": OpSpec(_LIGHTNING),
    "lightning_prefill": OpSpec(_LIGHTNING),
    "lightning_accept": OpSpec({"states": "L B H D D", "chain": "L J 2HD", "decay": "H 65"}),
    "gate_rows": OpSpec({"out": "T I", "norm": "I", "gate": "T I"}),
    "select_blocks": OpSpec(
        {
            "blocks": "T K W",
            "q": "T HD",
            "k1": "P K 4 D",
            "k2": "P K D",
            "k": "P K S D",
            "positions": "T",
            "slots": "T",
            "block_tables": "B N",
            "tree_masks": "T",
            "tree_base": "T",
        }
    ),
    "decode_attention": OpSpec(
        {
            "out": "T HD",
            "q": "T HD",
            "k": "P K S D",
            "v": "P K S D",
            "positions": "T",
            "slots": "T",
            "block_tables": "B N",
            "tree_masks": "T",
            "tree_base": "T",
            "blocks": "T K W",
        }
    ),
    "prefill_attention": OpSpec(
        {
            "out": "T HD",
            "q": "T HD",
            "k": "P K S D",
            "v": "P K S D",
            "positions": "T",
            "slots": "T",
            "block_tables": "B N",
            "blocks": "T K W",
        }
    ),
    "project": OpSpec({"out": "T O", "x": "T X", "norm": "I", "weight": "O I"}),
    "append_latent": OpSpec(
        {
            "q_latent": "T A",
            "pages": "P 1 S CR",
            "latents": "T ACR",
            "q_norm": "A",
            "kv_norm": "C",
            "rope": "2 M R/2",
            "positions": "T",
            "locations": "T",
            "slots": "T",
            "block_tables": "B N",
        }
    ),
    **dict.fromkeys(("decode_latent_attention", "prefill_latent_attention"), OpSpec(_LATENT_ATTENTION)),
    "project_residual": OpSpec({"x": "T C", "inner": "T I", "weight": "C I", "bias": "C"}),
    "gate_up": OpSpec({"out": "T F", "x": "T C", "norm": "C", "weight": "2F C"}),
    "route": OpSpec({"experts": "T A", "shares": "T A", "x": "T C", "norm": "C", "router": "E C"}),
    "experts_gate_up": OpSpec(
        {"out": "T AF", "x": "T C", "norm": "C", "weight": "2EF C", "experts": "T A", "shares": "T A"}
    ),
    "experts_down": OpSpec({"x": "T C", "inner": "T AF", "weight": "EC F", "experts": "T A", "shares": "T A"}),
    "lm_head": OpSpec({"logits": "R V", "x": "R C", "norm": "C", "weight": "V C"}),
    "rms_norm": OpSpec({"out": "T C", "x": "T C", "norm": "C"}),
    "join": OpSpec({"joined": "T AE", "a": "T A", "a_norm": "A", "b": "T E", "b_norm": "E"}),
    "copy_columns": OpSpec({"out": "T C", "x": "T E"}),
    "clear": OpSpec({"out": "T C"}),
}


def check_shapes(op: str, **operands: Any) -> Mapping[str, int]:
    """Match each operand's shape with the op's letters; None operands (an absent bias) are passed over.

    Returns letter -> size. Raises ValueError naming the op, the operand, the expected and the actual shape: a wrong
    shape here is a bug of the caller, never of the user.
    """
    shapes = [(name, tuple(operand.shape)) for name, operand in operands.items() if operand is not None]
    return _sizes(op, tuple(shapes))


# The layers of a model call an op with the same few shapes.
@lru_cache(maxsize=1024)
def _sizes(op: str, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> Mapping[str, int]:
    spec, sizes = OPS[op].operands, dict[str, int]()
    for name, shape in shapes:
        letters = spec[name].split()
        expected = [sizes.get(letter, letter) for letter in letters]
        if len(shape) != len(letters):
            raise ValueError(f"{op}: {name} has shape {shape}, expected {expected}")
        for letter, size in zip(letters, shape, strict=True):
            known = int(letter) if letter.isdigit() else sizes.setdefault(letter, size)
            if known != size:
                raise ValueError(f"{op}: {name} has shape {shape}, expected {expected}")
    return sizes


def check_latent_shapes(
    op: str, out: Any, q: Any, pages: Any, weights: Any, rope: Any, rows: Any, latents: Any | None = None
) -> None:
    """Check the operands of an op of latent attention as `check_shapes` does: its `LatentWeights` and `Rows` too."""
    check_shapes(
        op, out=out, q=q, latents=latents, q_norm=weights.q_norm, kv_norm=weights.kv_norm, pages=pages, up=weights.up,
        rope=rope, positions=rows.positions, locations=rows.locations, slots=rows.slots,
        block_tables=rows.block_tables, tree_masks=rows.tree_masks, tree_base=rows.tree_base,
    )  # fmt: skip

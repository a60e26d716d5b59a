"""Operand shapes and tolerances of every op, in one table.

Shape letters: T rows of the step, R rows that need logits, C hidden, F intermediate, H query heads, K KV heads,
D head dim, V vocabulary, P pages, S tokens of a page (64), M positions of the rotary table, B slots,
N pages of a slot's block table, W blocks that a row chooses (sparse attention), A and E widths of other rows. "HD" is
H times D, "AE" A plus E.

A tolerance is the largest allowed ‖out - oracle‖ / ‖oracle‖ for one op with operands of that storage type. It allows
another order of summation and, below float32, results on either side of a rounding tie.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cpmrt.dtypes import DType

_TOLERANCE = {DType.FLOAT32: 1e-5, DType.FLOAT16: 2e-3, DType.BFLOAT16: 1e-2}


@dataclass(frozen=True)
class OpSpec:
    """Operand name -> dimensions as letters separated by spaces, outputs first."""

    operands: dict[str, str]
    tolerance: dict[DType, float] = field(default_factory=lambda: dict(_TOLERANCE))


OPS = {
    "embed": OpSpec({"out": "T C", "token_ids": "T", "table": "V C"}),
    "qkv": OpSpec(
        {
            "q": "T HD",
            "k_pages": "P K S D",
            "v_pages": "P K S D",
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
            "k1_pages": "P K 4 D",
            "k2_pages": "P K D",
            "q_nope": "T HD",
            "nope_pages": "P K S D",
        }
    ),
    "select_blocks": OpSpec(
        {
            "blocks": "T K W",
            "q": "T HD",
            "k1_pages": "P K 4 D",
            "k2_pages": "P K D",
            "k_pages": "P K S D",
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
            "k_pages": "P K S D",
            "v_pages": "P K S D",
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
            "k_pages": "P K S D",
            "v_pages": "P K S D",
            "positions": "T",
            "slots": "T",
            "block_tables": "B N",
            "blocks": "T K W",
        }
    ),
    "project_residual": OpSpec({"x": "T C", "inner": "T I", "weight": "C I", "bias": "C"}),
    "gate_up": OpSpec({"out": "T F", "x": "T C", "norm": "C", "weight": "2F C"}),
    "lm_head": OpSpec({"logits": "R V", "x": "R C", "norm": "C", "weight": "V C"}),
    "rms_norm": OpSpec({"out": "T C", "x": "T C", "norm": "C"}),
    "join": OpSpec({"joined": "T AE", "a": "T A", "a_norm": "A", "b": "T E", "b_norm": "E"}),
    "copy_columns": OpSpec({"out": "T C", "x": "T E"}),
    "clear": OpSpec({"out": "T C"}),
}

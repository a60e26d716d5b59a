"""Operand shapes and tolerances of every op, in one table.

Shape letters: T rows of the step, R rows that need logits, C hidden, F intermediate, H query heads, K KV heads,
D head dim, V vocabulary, P pages, S tokens of a page (64), M positions of the rotary table, B slots,
N pages of a slot's block table. "HD" is H times D; "*" matches anything.

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
            "slots": "T",
            "block_tables": "B N",
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
        }
    ),
    "project_residual": OpSpec({"x": "T C", "inner": "T I", "weight": "C I", "bias": "C"}),
    "gate_up": OpSpec({"out": "T F", "x": "T C", "norm": "C", "weight": "2F C"}),
    "lm_head": OpSpec({"logits": "R V", "x": "R C", "norm": "C", "weight": "V C"}),
}

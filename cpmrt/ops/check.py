"""Shape check of an op call against its row in `ops/spec.py`."""

from __future__ import annotations

from typing import Any

from cpmrt.ops.spec import OPS


def check_shapes(op: str, **operands: Any) -> dict[str, int]:
    """Match each operand's shape with the op's letters; None operands (an absent bias) are passed over.

    Returns letter -> size. Raises ValueError naming the op, the operand, the expected and the actual shape: a wrong
    shape here is a bug of the caller, never of the user.
    """
    spec, sizes = OPS[op].operands, dict[str, int]()
    for name, operand in operands.items():
        if operand is None:
            continue
        letters = spec[name].split()
        expected = [sizes.get(letter, letter) for letter in letters]
        if len(operand.shape) != len(letters):
            raise ValueError(f"{op}: {name} has shape {operand.shape}, expected {expected}")
        for letter, size in zip(letters, operand.shape, strict=True):
            known = int(letter) if letter.isdigit() else sizes.setdefault(letter, size)
            if known != size:
                raise ValueError(f"{op}: {name} has shape {operand.shape}, expected {expected}")
    return sizes

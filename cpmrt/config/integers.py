"""Integers among the settings that a program gives: of any kind, NumPy's among them, but no bool."""

from __future__ import annotations

from numbers import Integral


def integer(value: object, low: int, high: int) -> int | None:
    """Return an integer in [low, high] as Python's own; None for anything else."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        return number if low <= number <= high else None
    return None

"""Checks numbers, mostly integers, among the settings that a program gives: of any type, also NumPy's, but not bool."""

from __future__ import annotations

from numbers import Integral

from cpmrt.errors import ConfigError, quoted


def is_number(value: object, kind: type) -> bool:
    """Whether a value is a number of this kind (`numbers.Integral`, `numbers.Real`); NumPy's are, bool is not."""
    return isinstance(value, kind) and not isinstance(value, bool)


def integer(value: object, low: int, high: int) -> int | None:
    """Return an integer in [low, high] as Python's own; None for anything else."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        return number if low <= number <= high else None
    return None


def checked_integer(what: str, value: object, low: int, high: int) -> int:
    """Return an integer in [low, high] as Python's own. Raises ConfigError."""
    number = integer(value, low, high)
    if number is None:
        raise ConfigError(what, expected=f"an integer in [{low}, {high}]", actual=quoted(value))
    return number


def checked_bits(what: str, value: object) -> int | None:
    """Return the bits to which weights are rounded, 4 or 8, or None for none. Raises ConfigError."""
    bits = integer(value, 4, 8)
    if value is not None and bits not in (4, 8):
        raise ConfigError(what, expected="4 | 8, or nothing", actual=quoted(value))
    return bits

"""Seeds of requests that bring none."""

from __future__ import annotations

_MASK = 2**64 - 1


def request_seed(seed: int, number: int) -> int:
    """Return the 64-bit seed of request `number` (from 0) under an engine's or a caller's `seed`.

    Each value goes through the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), a bijection that flips half of
    the bits: so neighbouring seeds and numbers give unrelated ones, and none of them is a small number.
    """
    return _mixed(_mixed(seed) + number)


def _mixed(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)

"""Warnings that name the line of a program that called cpmrt, however deep inside cpmrt they arise."""

from __future__ import annotations

import sys
import warnings

_OWN = ("cpmrt", "contextlib")
"""The packages whose lines are passed over; functions of contextlib are called by cpmrt's `with` statements."""


class CpmrtWarning(UserWarning):
    """A warning of cpmrt's own: what it names are arguments of its functions."""


def warn_caller(message: str) -> None:
    """Give a CpmrtWarning for the innermost line that is not in cpmrt itself."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _OWN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, CpmrtWarning, stacklevel=level)

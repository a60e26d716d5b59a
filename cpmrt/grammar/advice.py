"""Says what to change in a form that llguidance finds too complex."""

from __future__ import annotations

_FIXES = {
    "too many expressions": "repeat less often (as in {1,1000}), or name fewer alternatives",
    "(grammar) too big": "name fewer alternatives, or shorter ones",
    "items; max is": "name fewer optional properties, or fewer alternatives at one place",
}
"""A part of an error of llguidance -> what to change."""


def advice_for(reason: str) -> str | None:
    """Return what to change in a form that has failed for this reason of llguidance's, None if that is not known."""
    return next((fix for sign, fix in _FIXES.items() if sign in reason), None)

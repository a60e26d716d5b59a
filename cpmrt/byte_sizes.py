"""Sizes in bytes as people read them."""

from __future__ import annotations


def format_bytes(count: int) -> str:
    """Return a number of bytes in the unit that fits it: 1536 -> "1.50 KiB"."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.2f} {units[0]}"

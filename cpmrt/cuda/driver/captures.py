"""The lock that keeps captures of graphs apart from whatever would spoil them."""

from __future__ import annotations

from threading import RLock

CAPTURES = RLock()
"""Held during each capture, and while a handle of cuBLASLt is destroyed: that waits for the whole device, and would
spoil a capture that goes on meanwhile, also that of another model in the process. A capture with a loop in it takes the
lock twice."""

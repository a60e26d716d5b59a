"""Puts off the collection of garbage while much is made that stays.

Imports make some 100,000 objects, and a collection runs for every few hundred of them: a tenth of their time. The first
one afterwards would look through them all, unless they count as old.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """No collection of garbage in this process meanwhile, unless somebody asks for one. What is there at the end counts
    as old: a collection of the oldest generation looks at it."""
    were_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if were_on:
            if not gc.get_freeze_count():  # nobody has frozen anything, which this would thaw
                gc.freeze()
                gc.unfreeze()
            gc.enable()

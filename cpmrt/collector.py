"""Postpones garbage collection while many objects are made that will stay, as by imports.

Imports make some 100,000 objects, and Python starts a collection for every few hundred of them, which takes a tenth of
the time. The first collection afterwards would look through all of them, unless they count as old.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Switch automatic garbage collection off in this process inside the `with` block.

    If modules were imported inside, all objects that exist at the end count as old: only a collection of the oldest
    generation looks at them. Otherwise they do not: such collections are rare, so that models which a program opens and
    closes in turn would pile up.
    """
    were_on, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if were_on:
            if len(sys.modules) > modules and not gc.get_freeze_count():  # else this would thaw what somebody froze
                gc.freeze()
                gc.unfreeze()
            gc.enable()

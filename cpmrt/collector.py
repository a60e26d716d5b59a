"""Puts off the collection of garbage while much is made that stays.

Imports make some 100,000 objects, and a collection runs for every few hundred of them: a tenth of their time. The first
one afterwards would look through them all, unless they count as old.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """No collection of garbage in this process meanwhile, unless somebody asks for one.

    Where modules were imported, what is there at the end counts as old: a collection of the oldest generation alone
    looks at it. Elsewhere it does not, since that comes seldom: models opened and closed in turn would pile up.
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

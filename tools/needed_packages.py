"""Ends a tool with one line that says what to install, where packages are missing that only this tool needs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path


@contextmanager
def needing(*packages: str) -> Iterator[None]:
    """Exit with the command that installs these packages if the imports inside the `with` block miss one of them."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = [name for name in packages if find_spec(name) is None]
        if not missing:
            raise
        tool, install = Path(sys.argv[0]).name, f"{shlex.quote(sys.executable)} -m pip install {' '.join(missing)}"
        raise SystemExit(f"{tool} needs {' and '.join(missing)}, not installed here; {install}") from error

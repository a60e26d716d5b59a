"""Ends a tool with one line that says what to install, where packages are missing that only this tool needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cpmrt.installation import pip_install


@contextmanager
def needing(*packages: str) -> Iterator[None]:
    """Exit with the command that installs these packages if the imports inside the `with` block miss one of them."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = [name for name in packages if find_spec(name) is None]
        if not missing:
            raise
        tool, names = Path(sys.argv[0]).name, " and ".join(missing)
        raise SystemExit(f"{tool} needs {names}, not installed here; {pip_install(*missing)}") from error

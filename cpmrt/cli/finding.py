"""One line of `cpmrt doctor`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """BROKEN keeps cpmrt from running; MISSING costs a part of it; UNUSED matters to nothing on this machine."""

    OK = "ok"
    MISSING = "missing"
    UNUSED = "unused"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """What was looked at, its state, what was found, and the exact command that mends it ("" if none is needed)."""

    subject: str
    status: Status
    found: str
    fix: str = ""


def pip_install(*packages: str) -> str:
    """The command that installs packages beside the Python that runs."""
    return f"{sys.executable} -m pip install {' '.join(packages)}"

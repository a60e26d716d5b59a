"""Says which optional packages are missing, and the command that installs them, however cpmrt itself came here."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution, requires
from urllib.parse import unquote, urlsplit

from cpmrt.errors import ConfigError

EXTRAS = {
    "grammar": ("llguidance",),
    "server": ("starlette", "uvicorn", "httptools", "prometheus_client"),
    "modelscope": ("modelscope_hub",),
}
"""The packages of each extra that commands need, by the names under which Python imports them."""


def missing_packages(extra: str) -> list[str]:
    """Return those packages of an extra that cannot be imported."""
    return [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]


def check_extra(extra: str, who_needs: str) -> None:
    """Raise ConfigError, with the command that helps, if packages of an extra cannot be imported."""
    missing = missing_packages(extra)
    if missing:
        raise ConfigError(f"{who_needs} {', '.join(missing)}", fix=install_extra(extra))


def pip_install(*requirements: str) -> str:
    """Return the command that installs packages for this Python, ready to be pasted into a shell."""
    return f"{shlex.quote(sys.executable)} -m pip install {' '.join(map(shlex.quote, requirements))}"


def install_extra(extra: str) -> str:
    """Return the command that installs what an extra of cpmrt (server, modelscope, cuda12, cuda13) needs.

    It names the packages and not cpmrt[extra], because a checkout or a wheel need not be on any index.
    """
    return pip_install(*(_requirements(extra) or [f"cpmrt[{extra}]"]))


def install_missing(extra: str) -> str:
    """Return the command that installs those packages of an extra that cannot be imported."""
    missing = missing_packages(extra)
    wanted = [line for line in _requirements(extra) if package_of(line).replace("-", "_") in missing]
    return pip_install(*(wanted or [f"cpmrt[{extra}]"]))


def required() -> list[str]:
    """Return the requirements without which cpmrt cannot run, such as "rich>=13"; nothing where it is not installed."""
    return _requirements("")


def package_of(requirement: str) -> str:
    """Return the name of the package in a requirement, as "rich" in "rich>=13"."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def reinstall() -> str:
    """Return the command that puts cpmrt's own files back: from the checkout or wheel that it came from, if known."""
    try:
        origin = json.loads(distribution("cpmrt").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    source = unquote(urlsplit(origin["url"]).path) if "url" in origin else "cpmrt"
    editable = ["--editable"] if origin.get("dir_info", {}).get("editable") else []
    return pip_install("--force-reinstall", "--no-deps", *editable, source)


def _requirements(extra: str) -> list[str]:
    """Return the requirements that an extra adds to cpmrt's own, or with '' cpmrt's own.

    There are none where cpmrt is not installed.
    """
    try:
        lines = requires("cpmrt") or []
    except PackageNotFoundError:
        return []
    parts = [line.replace(" ", "").replace('"', "'").partition(";") for line in lines]
    wanted = f"extra=='{extra}'" if extra else ""
    return [requirement for requirement, _, marker in parts if marker == wanted]

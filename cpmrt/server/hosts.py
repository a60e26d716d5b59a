"""The host names to which a server answers: they keep out web pages that point a name of their own at it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address

_HOST = re.compile(r"(\[[^\[\]]*\]|[^\[\]:]*)(:[0-9]*)?")


def is_loopback(host: str) -> bool:
    """Tell whether a host, "localhost" or an address without brackets, is reached from this machine only."""
    if host == "localhost":
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


class AllowedHosts:
    """Tells whether a `Host` header names this server: a loopback address, "localhost", or one of `names`.

    Names are compared without their case, the port and a final dot. A request without a host passes: no browser sends
    one.
    """

    def __init__(self, names: Iterable[str]):
        self._names = {_plain(name) for name in names}

    def allow(self, header: bytes) -> bool:
        found = _HOST.fullmatch(header.decode("latin-1").strip())
        if found is None:
            return False
        name = _plain(found[1])
        return not name or name in self._names or is_loopback(name)


def _plain(name: str) -> str:
    return name.lower().removeprefix("[").removesuffix("]").removesuffix(".")

"""Tells systemd how the server is, if systemd has started it (sd_notify(3)); elsewhere nothing happens."""

from __future__ import annotations

import socket
from contextlib import suppress

from cpmrt import env


def notify(*lines: str) -> None:
    """Send a message such as "READY=1". A message that cannot be sent is dropped."""
    address = env.notify_socket()
    if address is None:
        return
    if address.startswith("@"):  # a name that is no file
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as connection:
        connection.sendto("\n".join(lines).encode(), address)

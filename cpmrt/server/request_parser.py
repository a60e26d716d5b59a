"""The parser of requests, which stays with HTTP/1.1 where a client offers to go on in another protocol (`Upgrade`)."""

from __future__ import annotations

from array import array
from contextlib import suppress
from typing import Protocol

from httptools import HttpParserUpgrade, HttpRequestParser


class ParsedHead(Protocol):
    """Who gets a request's parts, and keeps those of its head."""

    url: bytes
    headers: list[tuple[bytes, bytes]]


class RequestParser(HttpRequestParser):
    """Parses requests for `target`.

    httptools takes what follows a head with an `Upgrade` for the other protocol, also the request's body. So such a
    head is parsed a second time, without it; while `is_refusing` the target leaves out what it is told.
    """

    def __init__(self, target: ParsedHead):
        self._target = target
        self._begin()

    @property
    def is_refusing(self) -> bool:
        """Whether the head that has just been parsed will come again; that of CONNECT would be the same."""
        return self.should_upgrade() and self.get_method() != b"CONNECT"

    def feed_data(self, data: bytes | bytearray | memoryview | array[int]) -> None:
        """Parse the next bytes. Raises HttpParserError, and HttpParserUpgrade after CONNECT."""
        while True:
            try:
                return super().feed_data(data)
            except HttpParserUpgrade as upgrade:
                if not self.is_refusing:
                    raise
                data = self._plain_head() + bytes(data)[upgrade.args[0] :]
                self._begin()  # behind a head that also says `Connection: close` it would take nothing more

    def _begin(self) -> None:
        """Become a new parser."""
        super().__init__(self._target)
        with suppress(AttributeError):  # httptools before 0.6.3 is as lenient without it
            self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it

    def _plain_head(self) -> bytes:
        first = b"%s %s HTTP/%s" % (self.get_method(), self._target.url, self.get_http_version().encode())
        fields = [b"%s: %s" % field for field in self._target.headers if field[0] != b"upgrade"]
        return b"\r\n".join([first, *fields, b"", b""])

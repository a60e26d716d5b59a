"""The API keys of a server, which are compared in constant time, and the TLS certificate that it shows."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Iterable
from hmac import compare_digest
from pathlib import Path

from cpmrt.errors import ConfigError, reason_of

Headers = Iterable[tuple[bytes, bytes]]
_MAX_FILE_BYTES = 2**20


class ApiKeys:
    """The keys of which a request must send one, as `Authorization: Bearer KEY` or, as Anthropic's API, `x-api-key`.

    Raises ConfigError for an empty one.
    """

    def __init__(self, keys: Iterable[str]):
        self._digests = [_checked_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admit(self, headers: Headers) -> bool:
        """Tell whether a request with these headers has one of the keys. Every key is compared, even after a match."""
        sent = [key for name, value in headers if (key := _key_in(name, value)) is not None]
        return any([compare_digest(_digest(key), digest) for key in sent[:2] for digest in self._digests])


def _key_in(name: bytes, value: bytes) -> bytes | None:
    """Return the key that a header carries, None for a header that carries none."""
    if name == b"x-api-key":
        return value.strip()
    scheme, _, token = value.partition(b" ") if name == b"authorization" else (b"", b"", b"")
    return token.strip() if scheme.lower() == b"bearer" else None


def _checked_digest(key: str) -> bytes:
    _check_not_empty(key, "an API key")
    return _digest(key.encode())


def _digest(key: bytes) -> bytes:
    """Hash a key: digests have one length, so that comparing them tells nothing of the key's."""
    return hashlib.sha256(key).digest()


def read_keys(path: Path) -> tuple[str, ...]:
    """Read a file with an API key on each line; empty lines and those that begin with # do not count.

    Raises ConfigError if it cannot be read, has no key, or one that no header can carry.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
        if len(raw) > _MAX_FILE_BYTES:
            raise ConfigError(f"--api-key-file {path} is too large", expected=f"at most {_MAX_FILE_BYTES} bytes")
        # Some editors begin a file with a byte order mark, which would become part of the first key.
        lines = [line.strip() for line in raw.decode("utf-8-sig").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {reason_of(error)}") from error
    keys = {number: line for number, line in enumerate(lines, 1) if line and not line.startswith("#")}
    if not keys:
        raise ConfigError(f"--api-key-file {path} is empty", expected="a key on each line")
    for number, key in keys.items():
        check_key(key, f"the key in line {number} of --api-key-file {path}")
    return tuple(keys.values())


def check_key(key: str, source: str) -> None:
    """Raise ConfigError, which says where the key is from but not what it is, if it is empty or no header can carry it.

    Only printable ASCII passes: clients differ in how they encode other characters, if at all, and spaces at the ends
    get lost on the way.
    """
    _check_not_empty(key, source)
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ConfigError(
            f"{source} cannot be sent in an HTTP header", expected="printable ASCII, without spaces at its ends",
            fix="choose another key",
        )  # fmt: skip


def _check_not_empty(key: str, source: str) -> None:
    """Raise ConfigError for a key that would let everybody in, such as that of a variable which is not set."""
    if not key.strip():
        raise ConfigError(f"{source} is empty", expected="a key", fix="leave it out to have none")


def tls_context(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """Return the context that serves TLS with these PEM files: a certificate with its chain, and its private key.

    `key` None: the certificate's file has both. Keys with a pass phrase are refused, as nobody is there to type it.
    Raises ConfigError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = f"--ssl-certfile {certificate}" + (f" --ssl-keyfile {key}" if key else "")
        raise ConfigError(
            f"{files} cannot be used for TLS: {error}",
            fix="give the PEM file of the certificate with its chain, and that of its key without a pass phrase",
        ) from error
    return context

"""The chat page: the files in the folder `page`, and the headers that let nothing but these files run in it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
OPEN_PREFIX = "/page/"
"""The files under this path hold no secrets: they are served without an API key."""

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Pictures in data: addresses are the marks of Temml's style sheet.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


@dataclass(frozen=True)
class PageFile:
    """A file of the page, ready to be sent. `headers` have its type, its ETag and what may run in it."""

    content: bytes
    headers: dict[str, str]

    @property
    def etag(self) -> str:
        return self.headers["ETag"]


@cache
def page_files() -> dict[str, PageFile]:
    """Return the files of the page by their paths in its folder. Other paths lead to no file, whatever they say."""
    paths = [path for path in sorted(FOLDER.rglob("*")) if path.suffix in _TYPES]
    return {path.relative_to(FOLDER).as_posix(): _page_file(path) for path in paths}


def _page_file(path: Path) -> PageFile:
    content = path.read_bytes()
    headers = {
        "Content-Type": _TYPES[path.suffix],
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        # Browsers keep the files, but ask each time whether they are still the same.
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
    }
    return PageFile(content, headers)

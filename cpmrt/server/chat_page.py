"""The chat page and the policy that keeps everything else from running in it."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

PATH = Path(__file__).parent / "page" / "index.html"
_PARTS = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@cache
def chat_page() -> tuple[bytes, dict[str, str]]:
    """The page and its headers. Only its own script and styles, known by their hashes, are allowed."""
    text = PATH.read_text(encoding="utf-8")
    sources = {"script": "", "style": ""}
    for kind, content in _PARTS.findall(text):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        sources[kind] += f" 'sha256-{digest}'"
    policy = (
        f"default-src 'none'; script-src{sources['script']}; style-src{sources['style']}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return text.encode(), headers

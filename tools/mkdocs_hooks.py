"""A MkDocs hook for links from docs/ to files of the repository that are no pages of the site."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>\.\./[^)#\s]+)(?:#[^)\s]*)?\)")
log = logging.getLogger("mkdocs.hooks.links")
"""A child of MkDocs' logger, which counts the warnings: with --strict they fail the build."""


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links that leave docs/ by their text and the path of the file; warn if there is no such file."""

    def as_path(link: re.Match[str]) -> str:
        file = (Path(page.file.abs_src_path).parent / link["target"]).resolve()
        if file.is_relative_to(ROOT / "docs"):
            return link[0]
        if not (file.is_relative_to(ROOT) and file.exists()):
            log.warning("%s: '%s' is no file of the repository", page.file.src_uri, link["target"])
            return link[0]
        path = str(file.relative_to(ROOT))
        return f"`{path}`" if link["text"] == path else f"{link['text']} (`{path}`)"

    return LINK.sub(as_path, markdown)

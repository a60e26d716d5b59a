"""The site of docs/: it builds without network, shows the whole API, loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import cpmrt

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path.stem for path in (ROOT / "docs").glob("*.md"))
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data", "embed": "src"}
"""The attribute whose file a browser fetches, by tag; what <link> fetches depends on its rel."""


class Links(HTMLParser):
    """A parser that collects the files a browser loads for a page, its links' targets, and its elements' ids."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.ids.add(given.get("id") or "")
        if tag == "a":
            self.links.append(given.get("href") or "")
        if tag == "link" and (given.get("rel") or "") not in ("canonical", "next", "prev"):
            self.loaded.append(given.get("href") or "")
        self.loaded.append(given.get(LOADED.get(tag, "")) or "")


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site as CONTRIBUTING.md says, with proxies that lead nowhere in place of a network."""
    nowhere = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "tools/mkdocs.yml", "-d", str(site)],
        cwd=root,
        env={**os.environ, **nowhere, "PYTHONPATH": str(root), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_reference_has_every_public_name(site: Path) -> None:
    page = Links(site / "api.html")
    headings = {name.rpartition(".")[2] for name in page.ids}
    assert set(cpmrt.__all__) - {"__version__"} <= headings
    assert "cpmrt.__version__" in (site / "api.html").read_text()
    assert not headings & {"quoted", "listed"}, "functions of cpmrt.errors that are not public"


def test_the_reference_has_arguments_and_fields(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "api.html").read_text())
    for argument in ("memory_budget", "kv_dtype", "min_p", "max_thinking_tokens"):
        assert re.search(rf"\b{argument}\s*:", text), f"{argument} is in no signature"


def test_every_page_is_in_the_navigation(site: Path) -> None:
    links = Links(site / "index.html").links
    assert {f"{page}.html" for page in PAGES} - {"index.html"} <= set(links)


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    for page in PAGES:
        loaded = [target for target in Links(site / f"{page}.html").loaded if target]
        assert loaded
        for target in loaded:
            assert not re.match(r"(\w+:)?//", target), f"{page}: {target}"
            assert (site / target.partition("?")[0].partition("#")[0]).exists(), f"{page}: {target}"


def test_no_style_sheet_loads_from_another_host(site: Path) -> None:
    sheets = list(site.rglob("*.css"))
    assert sheets
    for sheet in sheets:
        text = sheet.read_text(encoding="utf-8")
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*", text), sheet


def test_a_file_outside_of_docs_is_named_instead_of_linked(site: Path) -> None:
    for page in PAGES:
        assert not [link for link in Links(site / f"{page}.html").links if link.startswith("../")]
    assert "<code>kernels_cu/README.md</code>" in (site / "performance.html").read_text()


def test_what_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "tools").mkdir()
    for name in ("mkdocs.yml", "mkdocs_hooks.py"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools")
    for page in PAGES:
        (tmp_path / "docs" / f"{page}.md").write_text(f"# {page}\n")
    (tmp_path / "docs" / "forgotten.md").write_text("# In no navigation\n")
    links = "[a](nowhere.md) [b](chat.md#nothing) [c](../tools/no_file.py) [d](../tools/mkdocs.yml)\n"
    (tmp_path / "docs" / "index.md").write_text(f"# Index\n\n{links}")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    for wrong in ("forgotten.md", "nowhere.md", "chat.md#nothing", "../tools/no_file.py"):
        assert re.search(rf"WARNING.*{re.escape(wrong)}|{re.escape(wrong)}$", done.stderr, re.MULTILINE), done.stderr
    assert "../tools/mkdocs.yml" not in done.stderr

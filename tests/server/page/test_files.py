"""The files of the chat page: all are served, they load nothing from other hosts, and no other script may run."""

from __future__ import annotations

import posixpath
import re

import pytest
from page_driving import ask
from serving import saying_llm, serving

from cpmrt.server.chat_page import FOLDER, page_files

OWN = sorted(name for name in page_files() if not name.startswith("vendor/"))
SINKS = (
    "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser", "srcdoc",
)  # fmt: skip


def test_the_first_page_stands_at_the_root(says):
    answer = says.client.get("/")
    assert answer.content == (FOLDER / "index.html").read_bytes()
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert says.client.get("/page/index.html").status_code == 404


@pytest.mark.parametrize("name", sorted(set(page_files()) - {"index.html"}))
def test_a_file_is_served_with_its_type_and_known_again(says, name):
    answer = says.client.get(f"/page/{name}")
    kind = {"css": "text/css", "js": "text/javascript", "mjs": "text/javascript", "svg": "image/svg+xml"}
    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["content-type"].split(";")[0] == kind[name.rpartition(".")[2]]
    again = says.client.get(f"/page/{name}", headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304 and again.content == b""


def test_only_files_of_the_page_are_served(says):
    for name in ("README.md", "vendor/temml/LICENSE", "../api.py", "%2e%2e/api.py", "..%2fapi.py", "", "styles"):
        assert says.client.get(f"/page/{name}").status_code == 404, name


def test_only_own_scripts_may_run_and_only_this_server_may_be_asked(says):
    for path in ("/", "/page/app.js"):
        policy = dict(part.strip().split(" ", 1) for part in
                      says.client.get(path).headers["content-security-policy"].split(";"))  # fmt: skip
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
        assert policy["connect-src"] == "'self'" and policy["require-trusted-types-for"] == "'script'"
        assert "unsafe" not in str(policy) and "http" not in str(policy)


def test_the_model_says_where_it_runs(says):
    assert says.client.get("/v1/models").json()["data"][0]["device"] == "cpu"


def test_the_page_needs_no_key_to_ask_for_one(tmp_path):
    with serving(lambda: saying_llm(tmp_path, lambda prompt: "yes"), api_keys=("secret",)) as server:
        assert server.client.get("/").status_code == server.client.get("/page/app.js").status_code == 200
        assert server.client.get("/v1/models").status_code == 401


@pytest.mark.parametrize("name", OWN)
def test_a_file_names_only_files_that_are_there(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    named = re.findall(r"""(?:from|import\(|href=|src=)\s*"([^"#]+)\"""", text)
    base = "" if name == "index.html" else posixpath.dirname(name)
    for path in named:
        resolved = posixpath.normpath(posixpath.join(base, path)).removeprefix("page/")
        assert resolved in page_files(), f"{name} names {path}"
    foreign = [url for url in re.findall(r"https?://[\w./-]*", text) if not url.startswith("http://www.w3.org/")]
    assert not re.search(r"@import|url\(", text) and [url for url in foreign if url != "https?://"] == []


@pytest.mark.parametrize("name", OWN)
def test_own_code_parses_no_html(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert [sink for sink in SINKS if sink in text] == []
    assert not re.search(r"<[^>]*\son\w+=", text)


def test_each_library_has_its_licence_beside_it_and_a_row_in_the_readme():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for folder in sorted((FOLDER / "vendor").iterdir()):
        assert "Permission is hereby granted" in (folder / "LICENSE").read_text(encoding="utf-8")
        assert f"vendor/{folder.name}" in readme


def test_the_scripts_load_and_answer(page):
    assert ask(page, "say(**yes**)yas").locator("strong").inner_text() == "yes"
    assert not page.problems

"""README, docs/ and the like: their length, a mention of every command, links with a target, examples that parse."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from cpmrt.cli.main import COMMANDS, module_name
from cpmrt.cli.parser import Parser

ROOT = Path(__file__).parents[2]
PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 120


def test_the_messages_that_are_explained_exist() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r'"([^"]+)"', " ".join(re.findall(r"^\|([^|]+)\|", page, re.MULTILINE)))
    assert len(messages) > 4
    sources = "\n".join(path.read_text() for path in (ROOT / "cpmrt").rglob("*.py"))
    for message in messages:
        for part in message.split(" ... "):
            assert part in sources, message


def test_the_readme_names_every_command() -> None:
    table = (ROOT / "README.md").read_text().partition("## Command line")[2].partition("## ")[0]
    named = set(re.findall(r"`([a-z-]+)", table))
    assert set(COMMANDS) <= named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def command_lines(page: Path) -> list[list[str]]:
    """Return the arguments of each cpmrt call in a page's code blocks, without comments, pipes and line breaks."""
    lines = []
    for block in re.findall(r"```[a-z]*\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"^python3 tools/dev\.py (?!test|gpu)", "cpmrt ", line.strip())
            if line.startswith("cpmrt "):
                words = shlex.split(line, comments=True)
                ends = [index for index, word in enumerate(words) if word in ("|", ">", "&", "&&", "<")]
                lines.append(words[1 : ends[0] if ends else None])
    return lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_parse(page: Path) -> None:
    for command, *words in command_lines(page):
        if command.startswith("-") or command == "help":
            continue
        parser = Parser(prog=f"cpmrt {command}")
        module = import_module(module_name(command))
        module.configure(parser)
        parser.parse_args(words)


def test_commands_of_pages_are_found() -> None:
    assert ["chat", "-m", "openbmb/MiniCPM4-0.5B"] in command_lines(ROOT / "README.md")
    assert len(command_lines(ROOT / "docs" / "performance.md")) == 5

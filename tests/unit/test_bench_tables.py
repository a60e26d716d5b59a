"""tools/bench_tables.py: its rows are commands that exist, and a row that fails hides none of the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tool_module import tool_module

from cpmrt.cli import bench
from cpmrt.cli.parser import Parser

DEMO = "--executor reference --case 16:4 --repeats 1"


tool = tool_module("bench_tables")


def test_the_rows_have_names_of_their_own() -> None:
    files = [tool.file_name(row) for row in tool.ROWS]
    assert len(files) == len(set(files)) > 40


@pytest.mark.parametrize("row", tool.ROWS, ids=lambda row: row.name)
def test_the_options_of_a_row_are_those_of_the_command(row: object) -> None:
    parser = Parser(prog="cpmrt bench")
    bench.configure(parser)
    python, option, package, command, *words = row.command  # type: ignore[attr-defined]
    assert (python, option, package, command) == (sys.executable, "-m", "cpmrt", "bench")
    assert parser.parse_args(words).cases


def test_a_row_that_fails_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tool.Row("broken", "--weight-bits 3"), tool.Row("demo", DEMO), tool.Row("demo again", DEMO)
    monkeypatch.setattr(tool, "ROWS", rows)
    monkeypatch.chdir(tmp_path)
    assert tool.main(["--out", ".", "--only", "^broken$|^demo$"]) == 1
    printed, table = capsys.readouterr().out, (tmp_path / "tables.md").read_text()
    assert "broken: exit code 2\n" in printed and "--weight-bits" in printed
    assert "| demo | 16:4:1 | " in printed and "| demo | 16:4:1 | " in table and "again" not in table
    assert (tmp_path / "demo.json").exists() and not (tmp_path / "broken.json").exists()


def test_no_row_begins_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--out", str(tmp_path), "--only", "^8b int4$", "--seconds", "-1"]) == 1
    assert capsys.readouterr().out == "8b int4: not begun within -1 s\n"


def test_names_that_no_row_has_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main(["--out", str(tmp_path), "--only", "9b"])
    assert "no row's name has '9b'; names are 8b int4; " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tool.main(["--out", str(tmp_path), "--only", "8b("])
    assert "'8b(' is no regular expression: " in capsys.readouterr().err

"""The plots of docs/performance.md show what its tables say, and README says the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tool_module import tool_module

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
ENERGY = """\
| case | cpmrt, joules a token | cpmrt, tok/s | llama.cpp, joules a token |
|---|---|---|---|
| 8B bf16 at 1K | **2.51** | 259 | 3.3 |
| 8B int4 at 1K | **0.94** | 676 | - |
"""


tool = tool_module("plot_performance")


def words_of(svg: Path) -> list[str]:
    """Return the texts that an SVG shows."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text(encoding="utf-8"))


def test_the_plots_are_up_to_date() -> None:
    wanted = tool.wanted(PAGE)
    assert wanted.keys() >= {"peers", "context"}
    drawn = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "plots").iterdir()}
    assert drawn.keys() == wanted.keys(), "run tools/plot_performance.py"
    for name, points in wanted.items():
        assert f"points {tool.digest(points)}<" in drawn[name], f"{name}: run tools/plot_performance.py"
        assert f"(plots/{name}.svg)" in PAGE, f"the page does not show {name}.svg"


def test_the_bars_have_the_numbers_of_the_page() -> None:
    rows = re.findall(r"^\| \S+ (?:bf16|int4) decode at 1K \|(.*)\|$", PAGE, re.MULTILINE)
    numbers = re.findall(r"[\d,]+", " ".join(re.sub(r"[*-]", "", row) for row in rows))
    assert len(numbers) > 8
    words = words_of(ROOT / "docs" / "plots" / "peers.svg")
    assert sorted(word for word in words if re.fullmatch(r"[\d,]+", word)) == sorted(numbers)


def test_cells_with_several_contexts_are_read() -> None:
    text = """\
| tok/s | cpmrt | CPM.cu 23aa7b7 (Marlin) |
|---|---|---|
| MiniCPM4-8B int4 prefill at 1K / 8K | **38.1K** / **37.7K** | - |
| MiniCPM4-8B int4 decode at 1K / 32K, sparse | **1,676** / 535.5 | 222 / - |
"""
    eight, decode = ("MiniCPM4-8B", "int4"), "decode"
    assert tool.speeds(text) == [
        tool.Speed(*eight, "prefill", 1024, "", "cpmrt", 38100),
        tool.Speed(*eight, "prefill", 8192, "", "cpmrt", 37700),
        tool.Speed(*eight, decode, 1024, "sparse", "cpmrt", 1676),
        tool.Speed(*eight, decode, 32768, "sparse", "cpmrt", 535.5),
        tool.Speed(*eight, decode, 1024, "sparse", "CPM.cu", 222),
    ]


@pytest.mark.parametrize(
    "row", ["| 8B at 1K | 2 |", "| 8B int4 decode at 1K | two |", "| 8B int4 decode at 1K / 8K | 2 |"]
)
def test_a_row_that_cannot_be_read_is_an_error(row: str) -> None:
    with pytest.raises(ValueError):
        tool.speeds(f"| tok/s | cpmrt |\n|---|---|\n{row}\n")


def test_a_changed_number_changes_the_digest() -> None:
    before = tool.wanted(PAGE)
    after = tool.wanted(re.sub(r"(8B bf16 decode at 1K \| \*\*)\d+", r"\g<1>1", PAGE))
    assert {name for name in before if tool.digest(before[name]) != tool.digest(after[name])} == {"peers", "context"}


def test_energy_is_read_where_a_heading_names_joules() -> None:
    expected = [
        tool.Joules("8B bf16 at 1K", "cpmrt", 2.51),
        tool.Joules("8B int4 at 1K", "cpmrt", 0.94),
        tool.Joules("8B bf16 at 1K", "llama.cpp", 3.3),
    ]
    assert tool.energy(ENERGY) == expected
    assert tool.energy("| Joules a token | cpmrt |\n|---|---|\n| 8B | 2 |\n") == [tool.Joules("8B", "cpmrt", 2)]
    assert tool.wanted("No tables.\n") == {}


def test_drawing_gives_the_same_file_twice(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, points in tool.wanted(PAGE + "\n" + ENERGY).items():
        first = tool.write(name, points, tmp_path).read_bytes()
        assert tool.write(name, points, tmp_path).read_bytes() == first
    assert {"2.51", "0.94", "3.3", "8B int4 at 1K, cpmrt"} <= set(words_of(tmp_path / "energy.svg"))


def test_the_readme_says_what_the_page_says() -> None:
    readme = tool.speeds((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(readme) > 15
    assert not set(readme) - set(tool.speeds(PAGE))

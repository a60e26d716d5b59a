"""Draws the plots of docs/performance.md from its own tables: `python tools/plot_performance.py`, with matplotlib.

Each SVG in docs/plots/ holds a digest of the rows that it shows, so that a test notices tables that changed later.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
PLOTS = ROOT / "docs" / "plots"
LABEL = re.compile(
    r"(?P<model>\S+) (?P<bits>bf16|int4) (?P<phase>decode|prefill) "
    r"at (?P<contexts>\d+K(?: / \d+K)*)(?:, (?P<variant>.+))?"
)
NUMBER = re.compile(r"\**([\d,]+(?:\.\d+)?)(K?)\**")
COLOURS = {"cpmrt": "#0072b2", "CPM.cu": "#d55e00", "llama.cpp": "#009e73", "transformers": "#8c8c8c"}
STYLES = {"": "-", "sparse": "--", "`--kv-dtype fp8`": ":"}
BITS = {"bf16": "16-bit weights", "int4": "4-bit weights"}


class Table(NamedTuple):
    """A Markdown table: the cells of its head and of its rows, as text."""

    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Speed:
    """One measured speed. `context` is in tokens; `variant` is "" for dense attention of one sequence."""

    model: str
    bits: str
    phase: str
    context: int
    variant: str
    program: str
    tokens_per_s: float


@dataclass(frozen=True)
class Joules:
    """The energy of one token; `case` and `program` are the row and the column of the table."""

    case: str
    program: str
    joules: float


Points = list[Speed] | list[Joules]


def tables(text: str) -> Iterator[Table]:
    """Yield the tables of a Markdown text."""
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        yield Table(head, rows)


def number(cell: str) -> float | None:
    """Return the number in a cell, such as **38.3K** or 1,961; None for a dash. Raises ValueError for anything else."""
    if cell == "-":
        return None
    found = NUMBER.fullmatch(cell)
    if not found:
        raise ValueError(f"{cell!r} is no number")
    return float(found[1].replace(",", "")) * (1000 if found[2] else 1)


def program_of(heading: str) -> str:
    """Return the name of a column without version and remark, such as CPM.cu for "CPM.cu 23aa7b7 (Marlin)"."""
    return heading.split()[0].rstrip(",")


def speeds(text: str) -> list[Speed]:
    """Return the speeds in tables whose head begins with "tok/s". Raises ValueError for a row of another form."""
    found = []
    for head, rows in (table for table in tables(text) if table.head[0] == "tok/s"):
        for label, *cells in rows:
            case = LABEL.fullmatch(label)
            if not case:
                raise ValueError(f"{label!r}: expected 'MODEL bf16|int4 decode|prefill at 1K / 8K, VARIANT'")
            contexts = [1024 * int(context[:-1]) for context in case["contexts"].split(" / ")]
            for heading, cell in zip(head[1:], cells, strict=True):
                values = [None] * len(contexts) if cell == "-" else [number(value) for value in cell.split(" / ")]
                for context, value in zip(contexts, values, strict=True):
                    if value is not None:
                        where = (case["model"], case["bits"], case["phase"], context, case["variant"] or "")
                        found.append(Speed(*where, program_of(heading), value))
    return found


def peers(text: str) -> list[Speed]:
    """Return the points of the plot against other programs: every decode speed of one sequence at 1K."""
    return [speed for speed in speeds(text) if (speed.phase, speed.context, speed.variant) == ("decode", 1024, "")]


def by_context(text: str) -> list[Speed]:
    """Return the points of the plot by context: decode speeds of MiniCPM4-8B, dense, sparse and with fp8."""
    decode = [speed for speed in speeds(text) if (speed.model, speed.phase) == ("MiniCPM4-8B", "decode")]
    return [speed for speed in decode if speed.variant in STYLES]


def energy(text: str) -> list[Joules]:
    """Return the energies in columns with "joules" in their heading, or in the first heading, which stands for all."""
    found = []
    for head, rows in tables(text):
        everywhere = "joules" in head[0].lower()
        for column in range(1, len(head)):
            if everywhere or "joules" in head[column].lower():
                values = ((row[0], number(row[column])) for row in rows)
                program = program_of(head[column])
                found += [Joules(case, program, joules) for case, joules in values if joules is not None]
    return found


def draw_peers(figure: Figure, points: list[Speed]) -> None:
    """Draw a panel of bars for each model and number of bits, a bar a program."""
    panels = list(dict.fromkeys((point.model, point.bits) for point in points))
    figure.set_size_inches(9, 4.2)
    for axes, (model, bits) in zip(figure.subplots(2, (len(panels) + 1) // 2).flat, panels, strict=False):
        shown = [point for point in points if (point.model, point.bits) == (model, bits)]
        bars(axes, [(point.program, point.program, point.tokens_per_s) for point in shown])
        axes.set_title(f"{model}, {BITS[bits]}")
    figure.supxlabel("tokens a second at 1K tokens of context, one sequence", fontsize=9)


def draw_by_context(figure: Figure, points: list[Speed]) -> None:
    """Draw a panel for each number of bits, a line for each program and kind of attention."""
    figure.set_size_inches(9, 5)
    panels = list(dict.fromkeys(point.bits for point in points))
    for axes, bits in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True):
        shown = [point for point in points if point.bits == bits]
        for program, variant in dict.fromkeys((point.program, point.variant) for point in shown):
            line = [point for point in shown if (point.program, point.variant) == (program, variant)]
            if variant == "sparse":  # at 1K attention is not sparse yet, so that point is the dense one's
                short = (program, "", 1024)
                line += [point for point in shown if (point.program, point.variant, point.context) == short]
            label = f"{program} {variant.strip('`')}".strip()
            xs, ys = zip(*sorted((point.context / 1024, point.tokens_per_s) for point in line), strict=True)
            axes.plot(xs, ys, STYLES[variant], color=COLOURS[program], marker="o", markersize=4, label=label)
        contexts = sorted({point.context // 1024 for point in shown})
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [f"{context}K" for context in contexts])
        axes.set_ylim(bottom=0)
        axes.set_title(f"MiniCPM4-8B, {BITS[bits]}, one sequence, by context")
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
    figure.supylabel("tokens a second", fontsize=9)


def draw_energy(figure: Figure, points: list[Joules]) -> None:
    """Draw one panel with a bar for each case and program."""
    figure.set_size_inches(9, 1 + 0.35 * len(points))
    bars(figure.subplots(), [(f"{point.case}, {point.program}", point.program, point.joules) for point in points])
    figure.supxlabel("joules a token", fontsize=9)


def bars(axes: Axes, rows: list[tuple[str, str, float]]) -> None:
    """Draw horizontal bars from the top: rows are a label, the program that gives the colour, and the length."""
    labels, programs, values = zip(*rows, strict=True)
    # Bars are placed by position, as matplotlib would merge bars with equal labels.
    drawn = axes.barh(range(len(rows)), values, color=[COLOURS.get(program, "#0072b2") for program in programs])
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.bar_label(drawn, [f"{value:,.4g}" if value < 1000 else f"{value:,.0f}" for value in values], padding=3)
    axes.set_xlim(0, 1.2 * max(values))
    axes.set_xticks([])


class Plot(NamedTuple):
    """A plot: the functions that read its points from the page and that draw them."""

    points: Callable[[str], Points]
    draw: Callable[[Any, Any], None]


PLOTS_OF_PAGE = {
    "peers": Plot(peers, draw_peers),
    "context": Plot(by_context, draw_by_context),
    "energy": Plot(energy, draw_energy),
}


def wanted(text: str) -> dict[str, Points]:
    """Return the points of each plot of a page, by name, without plots for which the tables have no numbers."""
    found = {name: plot.points(text) for name, plot in PLOTS_OF_PAGE.items()}
    return {name: points for name, points in found.items() if points}


def digest(points: Points) -> str:
    """Return the digest of points that a plot has in its metadata."""
    return hashlib.sha256(repr(points).encode()).hexdigest()


def write(name: str, points: Points, folder: Path) -> Path:
    """Draw one plot into a folder; return its path. The same points give the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {
        "svg.hashsalt": name, "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9, "axes.titlesize": 9,
        "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    path = folder / f"{name}.svg"
    with matplotlib.rc_context(style):
        figure = Figure(layout="constrained")
        PLOTS_OF_PAGE[name].draw(figure, points)
        figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": f"points {digest(points)}"})
    return path


def main() -> int:
    """Draw all plots of the page and remove those that its tables no longer have numbers for."""
    from needed_packages import needing

    with needing("matplotlib"):
        import matplotlib  # noqa: F401
    found = wanted(PAGE.read_text(encoding="utf-8"))
    PLOTS.mkdir(exist_ok=True)
    for name in sorted(PLOTS_OF_PAGE.keys() - found):
        (PLOTS / f"{name}.svg").unlink(missing_ok=True)
        print(f"{name}: the tables have no such numbers")
    for name, points in found.items():
        print(write(name, points, PLOTS).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())

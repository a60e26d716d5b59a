"""The settings that are compared, and functions that show stored results as Markdown tables and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cpmrt.config import SparseConfig, SparseSetting
from cpmrt.config.sparse import with_sparse_setting

Results = Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """A setting of sparse attention, which is a row of every table: its label, and the argument `sparse` of LLM."""

    label: str
    sparse: SparseSetting

    @property
    def config(self) -> SparseConfig | None:
        """The configuration that the setting gives a model without a sparse_config of its own."""
        return SparseConfig.from_hf(with_sparse_setting({}, self.sparse), self.label)

    @property
    def budget(self) -> str:
        """The number of blocks that a token attends to, and in brackets how many of them are chosen by score."""
        config = self.config
        return "all" if config is None else f"{config.num_selected} ({config.num_scored})"


def _fixed(window: int, topk: int) -> dict[str, int]:
    return {"init_blocks": 1, "window_size": window, "topk": topk, "dense_len": -1}


def _flags(window: int, topk: int, switch: int) -> dict[str, int]:
    return {"sink_window_size": 1, "block_window_size": window, "sparse_topk_k": topk, "sparse_switch": switch}


ALWAYS_SPARSE = Setting("always sparse", _fixed(64, 2))
OFFICIAL = Setting("official", {"init_blocks": 1, "window_size": 2048, "topk": 64, "dense_len": 8192})
SETTINGS = (
    Setting("dense", "off"),
    OFFICIAL,
    Setting("CPM.cu, command line", _flags(8, 64, 0)),
    Setting("CPM.cu, Python class", _flags(32, 32, 8192)),
    Setting("a half", _fixed(1024, 32)),
    Setting("a quarter", _fixed(512, 16)),
    Setting("an eighth", _fixed(256, 8)),
)


def tables(results: Results) -> Iterator[str]:
    """Yields a table for every part with results, below a line that says what was measured."""
    writers = {"needles": _needles, "text": _text, "mass": _mass, "asked": _asked, "unions": _unions}
    for part, write in writers.items():
        if part in results:
            yield "\n".join(write(results[part]))


def _needles(part: Results) -> Iterator[str]:
    lengths = part["lengths"]
    yield f"Statements found again, in % of {part['questions']} questions a cell, by tokens of context:\n"
    yield from _head(["setting", "blocks (by score)", *map(_thousands, lengths)])
    for label, row in part["settings"].items():
        cells = [f"{100 * sum(row['grid'][str(length)]) / len(row['grid'][str(length)]):.1f}" for length in lengths]
        yield _line([label, row["budget"], *cells])
    decoded = [row["decoded"] for row in part["settings"].values()]
    asked, same = (sum(counts[name] for counts in decoded) for name in ("asked", "same"))
    yield f"\nOf {asked} questions asked again by decoding, {same} gave the same."


def _text(part: Results) -> Iterator[str]:
    rows = part["settings"]
    spans = [f"{_thousands(span['low'])}-{_thousands(span['high'])}" for span in next(iter(rows.values()))]
    counts = ", ".join(str(span["count"]) for span in next(iter(rows.values())))
    yield "Perplexity, KL(dense || sparse) in thousandths of a nat, and equal greedy tokens, by position in"
    yield f"{part['windows']} texts of {part['length']} tokens ({counts} predictions; {part['provenance']}):\n"
    yield from _head(["setting", *spans])
    for label, spans_of in rows.items():
        yield _line([label, *(_divergence(span) for span in spans_of)])


def _divergence(span: Results) -> str:
    return f"{span['perplexity']:.3f}; {1000 * span['kl']:.2f}; {100 * span['agreement']:.1f} %"


def _mass(part: Results) -> Iterator[str]:
    yield f"Dense attention inside the chosen blocks, in %, in a text of {part['length']} tokens: every layer and query"
    yield "head at the positions that leave blocks out; in brackets, what the best blocks would hold:\n"
    yield from _shares(part)


def _asked(part: Results) -> Iterator[str]:
    yield f"The same where statements are asked for, at the end of {part['length']} tokens:\n"
    yield from _shares(part)


def _unions(part: Results) -> Iterator[str]:
    yield "Blocks that neighbouring tokens choose together, official settings: mean over layers and KV heads, lowest"
    yield "and highest of these; in brackets, what random scores would give:\n"
    counts = list(next(iter(part.values()), {}))
    yield from _head(["tokens", *(f"{count} neighbours" for count in counts)])
    for length, row in part.items():
        yield _line([_thousands(int(length)), *(_union(row[count]) for count in counts)])


def _union(cell: Results) -> str:
    means = [mean for layer in cell["unions"] for mean in layer]
    mean, low, high = sum(means) / len(means), min(means), max(means)
    return f"{mean:.0f}, {low:.0f} to {high:.0f} ({cell['chance']:.0f})"


def _shares(part: Results) -> Iterator[str]:
    yield from _head(["setting", "positions", "mean", "lowest tenth", "worst layer"])
    for label, row in part["settings"].items():
        names = ("mean", "tenth", "layer") if row else ()
        cells = [f"{_percent(row[name])} ({_percent(row['best_' + name])})" for name in names]
        yield _line([label, str(row.get("rows", 0)), *(cells or ["-"] * 3)])


def _head(names: Sequence[str]) -> Iterator[str]:
    yield _line(names)
    yield _line(["---"] * len(names))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _thousands(count: int) -> str:
    return f"{count // 1024}K" if count and count % 1024 == 0 else str(count)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def plot_needles(part: Results, path: Path) -> None:
    """Draws a panel for each setting: context length across, depth of the statement down, share found as colour."""
    from matplotlib.figure import Figure

    lengths, settings = part["lengths"], part["settings"]
    figure: Any = Figure(figsize=(2.1 * len(settings) + 0.9, 2.9), layout="constrained")
    axes = figure.subplots(1, len(settings), sharey=True, squeeze=False)[0]
    for axis, (label, row) in zip(axes, settings.items(), strict=True):
        grid = np.array([row["grid"][str(length)] for length in lengths]).T
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axis.set_title(f"{label}\n{row['budget']} blocks", fontsize=8)
        axis.set_xticks(range(len(lengths)), [f"{length // 1024}K" for length in lengths], fontsize=7)
        middles = [f"{100 * (depth + 0.5) / len(grid):.0f} %" for depth in range(len(grid))]
        axis.set_yticks(range(len(grid)), middles, fontsize=7)
    axes[0].set_ylabel("depth", fontsize=8)
    figure.colorbar(image, ax=list(axes), label="found", fraction=0.02)
    figure.savefig(path, dpi=110)

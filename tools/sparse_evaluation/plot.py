"""The needle grid as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sparse_evaluation.tables import Results


def plot_needles(part: Results, path: Path) -> None:
    """A panel for each setting: context length across, depth of the statement down, found or not as colour."""
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

"""Draws a benchmark over time: power, clock and utilisation, with the phases shaded."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from cpmrt.bench.report import Report
from cpmrt.errors import CpmrtError

_CURVES = (("power_w", "power, W"), ("sm_clock_mhz", "SM clock, MHz"), ("utilisation_percent", "utilisation, %"))
_SHADES = {"prefill": "tab:orange", "decode": "tab:blue"}


def check_can_plot() -> None:
    """Raise CpmrtError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise CpmrtError("a plot needs matplotlib", fix=f"{sys.executable} -m pip install matplotlib")


def plot(report: Report, path: Path) -> None:
    """Write a PNG. Raises CpmrtError if matplotlib is missing or the file cannot be written."""
    check_can_plot()
    from matplotlib.figure import Figure

    samples = report.samples
    origin = samples.times_s[0] if samples.times_s else 0.0
    figure = Figure(figsize=(11, 7), layout="constrained")
    panels = figure.subplots(len(_CURVES), 1, sharex=True)
    for axes, (name, label) in zip(panels, _CURVES, strict=True):
        points = samples.points(name)
        axes.plot([time - origin for time, _ in points], [value for _, value in points], color="black", linewidth=1)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        _shade(axes, report, origin)
    panels[-1].set_xlabel("s")
    panels[0].legend(loc="upper right")
    device = report.device.get("name", "CPU")
    kinds = ", ".join([report.dtype, *report.speculation])
    figure.suptitle(f"{report.model}, {kinds}, executor {report.executor}, {device}, {report.date[:10]}")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise CpmrtError(f"{path} cannot be written: {error.strerror}") from error


def _shade(axes: object, report: Report, origin: float) -> None:
    seen = set()
    for case in report.cases:
        result = case.measurement
        for phase, spans in (("prefill", result.prefill_spans), ("decode", result.decode_spans)):
            for start, end in spans:
                label = None if phase in seen else phase
                seen.add(phase)
                axes.axvspan(  # type: ignore[attr-defined]
                    start - origin, end - origin, color=_SHADES[phase], alpha=0.25, linewidth=0, label=label
                )

"""A benchmark's report for a reader: a summary, a line for each case as it is done, a table, a plot over time."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from cpmrt.bench.report import CaseReport, Report
from cpmrt.errors import CpmrtError, reason_of

_COLUMNS: tuple[tuple[str, Callable[[CaseReport], str]], ...] = (
    ("case", lambda case: str(case.measurement.case)),
    ("prefill tok/s", lambda case: _number(case.measurement.prefill_tokens_per_s)),
    ("TFLOP/s", lambda case: _number(case.measurement.prefill_tflops, 1)),
    ("first token ms", lambda case: _number(case.measurement.first_token_ms, 2)),
    ("decode tok/s", lambda case: _decode(case, case.measurement.decode_tokens_per_s, 1)),
    ("accept", lambda case: _accept(case)),
    ("p50 ms", lambda case: _decode(case, case.measurement.step_ms_p50, 3)),
    ("p99 ms", lambda case: _decode(case, case.measurement.step_ms_p99, 3)),
    ("GB/s", lambda case: _decode(case, case.measurement.decode_gb_per_s)),
    ("% of read", lambda case: _decode(case, case.read_share and 100 * case.read_share, 1)),
    ("host us", lambda case: _decode(case, case.measurement.host_us_per_step, 1)),
    ("J/token", lambda case: _number(case.decode.joules_per_token, 3)),
    ("W", lambda case: _number(case.decode.power_w)),
    ("MHz", lambda case: _number(case.decode.sm_clock_mhz)),
    ("C", lambda case: _number(case.decode.temperature_c)),
    ("throttled by", lambda case: ", ".join(_reasons(case)) or "-"),
)
_CURVES = (("power_w", "power, W"), ("sm_clock_mhz", "SM clock, MHz"), ("utilisation_percent", "utilisation, %"))
_SHADES = {"prefill": "tab:orange", "decode": "tab:blue"}


def summary(report: Report) -> str:
    """Return two lines: the model, its settings and the device; then the figures that belong to no case."""
    device = report.device.get("name", "the CPU")
    driver = report.device.get("nvidia_driver")
    where = f"{device}, driver {driver}" if driver else device
    facts = [f"loaded in {report.load_s:.2f} s"]
    if report.read_gb_per_s is not None:
        facts.insert(0, f"memory reads {report.read_gb_per_s:,.0f} GB/s")
    if report.process_to_first_token_s is not None:
        facts.append(f"a fresh process gives its first token after {report.process_to_first_token_s:.2f} s")
    sampling = [f"T = {report.temperature:g}"] if report.temperature else []
    kinds = ", ".join([report.dtype, *report.quantization, *report.speculation, *sampling])
    return f"{report.model}, {kinds}, executor {report.executor} on {where}\n{'; '.join(facts)}\n"


def header() -> list[str]:
    """Return the names of the columns. Power, clock and temperature are means over decoding."""
    return [name for name, _ in _COLUMNS]


def rows(report: Report) -> list[list[str]]:
    """Return a row for each case, named prompt:new[:sequences]; "-" stands for a missing figure."""
    return [[cell(case) for _, cell in _COLUMNS] for case in report.cases]


def line(case: CaseReport) -> str:
    """Return the main figures of one case on one line."""
    result = case.measurement
    share = "" if case.read_share is None else f" ({case.read_share:.1%} of the read bandwidth)"
    return (
        f"{result.case}: prefill {result.prefill_tokens_per_s:,.0f} tok/s {result.prefill_tflops:.0f} TFLOP/s, "
        f"decode {result.decode_tokens_per_s:.1f} tok/s{_with_accept(case)}{_screened(case)}, "
        f"step {result.step_ms_p50:.3f} ms p99 {result.step_ms_p99:.3f}, "
        f"{result.decode_gb_per_s:.0f} GB/s{share}, host {result.host_us_per_step:.1f} us"
    )


def _accept(case: CaseReport) -> str:
    result = case.measurement
    return _number(result.mean_accept_length, 2) + " simulated" * result.is_simulated


def _with_accept(case: CaseReport) -> str:
    return "" if case.measurement.mean_accept_length is None else f" at accept length {_accept(case)}"


def _screened(case: CaseReport) -> str:
    rescored = case.measurement.mean_rescored
    return "" if rescored is None else f" with {rescored:,.0f} tokens of a screened head a step"


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _decode(case: CaseReport, value: float | None, digits: int = 0) -> str:
    return _number(value if case.measurement.step_ms else None, digits)


def _reasons(case: CaseReport) -> list[str]:
    return sorted({*case.prefill.throttle_reasons, *case.decode.throttle_reasons})


def check_can_plot() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise CpmrtError("a plot needs matplotlib", fix=f"{sys.executable} -m pip install matplotlib")


def plot(report: Report, path: Path) -> None:
    """Write a PNG, whatever `path` ends with. Raises CpmrtError if matplotlib is missing or the disk takes no file."""
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
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise CpmrtError(f"{path} cannot be written: {reason_of(error)}") from error


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

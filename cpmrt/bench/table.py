"""The report as text for a reader: a summary, a line for each case as it is done, a table with a row for each."""

from __future__ import annotations

from collections.abc import Callable

from cpmrt.bench.report import CaseReport, Report

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


def summary(report: Report) -> str:
    """What ran on what, in two lines."""
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
    """Names of the columns. Power, clock and temperature are means over decoding, J is of a decoded token."""
    return [name for name, _ in _COLUMNS]


def rows(report: Report) -> list[list[str]]:
    """One for each case, named prompt:new[:sequences]; "-" where a figure is missing."""
    return [[cell(case) for _, cell in _COLUMNS] for case in report.cases]


def line(case: CaseReport) -> str:
    """The gist of one case."""
    result = case.measurement
    share = "" if case.read_share is None else f" ({case.read_share:.1%} of the read bandwidth)"
    return (
        f"{result.case}: prefill {result.prefill_tokens_per_s:,.0f} tok/s {result.prefill_tflops:.0f} TFLOP/s, "
        f"decode {result.decode_tokens_per_s:.1f} tok/s{_with_accept(case)}, step {result.step_ms_p50:.3f} ms p99 "
        f"{result.step_ms_p99:.3f}, {result.decode_gb_per_s:.0f} GB/s{share}, host {result.host_us_per_step:.1f} us"
    )


def _accept(case: CaseReport) -> str:
    result = case.measurement
    return _number(result.mean_accept_length, 2) + " simulated" * result.is_simulated


def _with_accept(case: CaseReport) -> str:
    return "" if case.measurement.mean_accept_length is None else f" at accept length {_accept(case)}"


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _decode(case: CaseReport, value: float | None, digits: int = 0) -> str:
    return _number(value if case.measurement.step_ms else None, digits)


def _reasons(case: CaseReport) -> list[str]:
    return sorted({*case.prefill.throttle_reasons, *case.decode.throttle_reasons})

"""Formats measurements of single kernels as lines of text, and as the table in `kernels_cu/README.md`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BEGIN, END = "<!-- measured: tools/bench_kernels.py --write -->", "<!-- end of measured -->"


@dataclass(frozen=True)
class Line:
    """One measurement. `rate` is in bytes or operations a second, `share` its part of the device's measured ceiling."""

    shape: str
    kernel: str
    case: str
    us: float
    unit: str
    rate: float
    share: float

    def __str__(self) -> str:
        place = f"{self.shape:14s} {self.kernel:24s} {self.case:22s}"
        return f"{place} {self.us:9.2f} us {self.amount:>12s} {self.share:6.1%}"

    @property
    def amount(self) -> str:
        """The rate with its unit, for people."""
        return f"{self.rate / 1e12:.0f} TFLOP/s" if self.unit == "FLOP" else f"{self.rate / 1e9:,.0f} GB/s"


def markdown(lines: Iterable[Line], device: str, ceilings: dict[str, float]) -> str:
    """Returns a table with a row for each kernel and case, a column for each shape."""
    found = list(lines)
    shapes = list(dict.fromkeys(line.shape for line in found))
    rows: dict[tuple[str, str], dict[str, Line]] = {}
    for line in found:
        rows.setdefault((line.kernel, line.case), {})[line.shape] = line
    text = [
        f"{device}: memory reads {ceilings['byte'] / 1e12:.2f} TB/s, the fastest product {ceilings['FLOP'] / 1e12:.0f} "
        "TFLOP/s; bf16.",
        "",
        f"| kernel | case | {' | '.join(shapes)} |",
        "|---|---|" + "---|" * len(shapes),
    ]
    for (kernel, case), of_shape in rows.items():
        cells = (of_shape.get(shape) for shape in shapes)
        shown = (f"{line.us:.1f} us, {line.amount}, {line.share:.0%}" if line else "" for line in cells)
        text.append(f"| {kernel} | {case} | {' | '.join(shown)} |")
    return "\n".join(text)


def replaced(text: str, table: str) -> str:
    """Returns `text` with the part between the markers replaced. Raises ValueError if they are not there."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"

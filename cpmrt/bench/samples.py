"""The readings of a monitor over time, and their means, throttle reasons and energy over parts of that time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

Span = tuple[float, float]
"""Start and end, in seconds of `time.perf_counter`."""

SHORTEST_ENERGY_S = 0.5
"""The shortest time an energy is stated for: boards renew power and energy only some ten times a second."""

# Bits of nvmlDeviceGetCurrentClocksEventReasons, from nvml.h. Idle, application clocks and display are no throttling.
_THROTTLE_BITS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x200: "board limit",
    0x400: "reliability",
}


@dataclass
class Samples:
    """Readings by name, each with one value for each of `times_s`; None where a reading failed."""

    times_s: list[float] = field(default_factory=list)
    readings: dict[str, list[float | None]] = field(default_factory=dict)

    def points(self, name: str, spans: Sequence[Span] | None = None) -> list[tuple[float, float]]:
        """Return times and values of a reading within any of the spans (None: at any time), failed ones left out."""
        return [
            (time, value)
            for time, value in zip(self.times_s, self.readings.get(name, ()), strict=False)
            if value is not None and (spans is None or any(start <= time <= end for start, end in spans))
        ]

    def mean(self, name: str, spans: Sequence[Span] | None = None) -> float | None:
        """Return the mean of a reading; None if there is none."""
        values = [value for _, value in self.points(name, spans)]
        return sum(values) / len(values) if values else None

    def throttle_reasons(self, spans: Sequence[Span] | None = None) -> tuple[str, ...]:
        """Return the reasons why the clocks were held down at any time of the spans."""
        seen = 0
        for _, bits in self.points("throttle_bits", spans):
            seen |= int(bits)
        return tuple(reason for bit, reason in _THROTTLE_BITS.items() if seen & bit)

    def energy_j(self, spans: Sequence[Span]) -> float | None:
        """Return joules over all spans, by the board's counter or from its power; None if neither covers them."""
        if sum(end - start for start, end in spans) < SHORTEST_ENERGY_S:
            return None
        counter = self.points("energy_j")
        if not _covers(counter, spans):
            counter = _integral(self.points("power_w"))
        if not _covers(counter, spans):
            return None
        return sum(_at(counter, end) - _at(counter, start) for start, end in spans)


def _covers(points: Sequence[tuple[float, float]], spans: Sequence[Span]) -> bool:
    slack = SHORTEST_ENERGY_S / 2
    return len(points) > 1 and all(
        points[0][0] <= start + slack and end - slack <= points[-1][0] for start, end in spans
    )


def _integral(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    total, sums = 0.0, [(time, 0.0) for time, _ in points[:1]]
    for (before, low), (after, high) in pairwise(points):
        total += (after - before) * (low + high) / 2
        sums.append((after, total))
    return sums


def _at(points: Sequence[tuple[float, float]], time: float) -> float:
    """Return the value at a time, on the line between its neighbours, or through the nearest two at the ends."""
    right = min(max(bisect_left(points, (time, 0.0)), 1), len(points) - 1)
    (before, low), (after, high) = points[right - 1], points[right]
    return low + (high - low) * (time - before) / (after - before) if after > before else high

"""The results of a benchmark as data, which the JSON file has and which the table and the plot are drawn from."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from typing import Any

from cpmrt import __version__
from cpmrt.bench.measure import Measurement
from cpmrt.bench.samples import Samples, Span

_PACKAGES = ("numpy", "cupy", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cublas", "nvidia-ml-py")
_MEANS = ("power_w", "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "utilisation_percent")


@dataclass(frozen=True)
class PhaseReadings:
    """Means of the device's readings over one phase of a case, all repeats together; None where the board has none."""

    power_w: float | None
    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    temperature_c: float | None
    utilisation_percent: float | None
    energy_j: float | None
    joules_per_token: float | None
    throttle_reasons: tuple[str, ...]

    @classmethod
    def of(cls, samples: Samples, spans: Sequence[Span], num_tokens: int) -> PhaseReadings:
        """Return the readings over these spans, in which `num_tokens` were read or generated."""
        energy = samples.energy_j(spans)
        joules = energy / num_tokens if energy is not None and num_tokens else None
        means = {name: samples.mean(name, spans) for name in _MEANS}
        reasons = samples.throttle_reasons(spans)
        return cls(**means, energy_j=energy, joules_per_token=joules, throttle_reasons=reasons)


@dataclass(frozen=True)
class CaseReport:
    """The times of one case and the device's readings during it. Decoding uses `read_share` of the read bandwidth."""

    measurement: Measurement
    read_share: float | None
    prefill: PhaseReadings
    decode: PhaseReadings

    @classmethod
    def of(cls, measurement: Measurement, samples: Samples, read_gb_per_s: float | None) -> CaseReport:
        """Join the times of a case with the samples taken during it."""
        case = measurement.case
        num_read = case.prompt_tokens * case.sequences * len(measurement.prefill_spans)
        return cls(
            measurement,
            measurement.decode_gb_per_s / read_gb_per_s if read_gb_per_s else None,
            PhaseReadings.of(samples, measurement.prefill_spans, num_read),
            PhaseReadings.of(samples, measurement.decode_spans, measurement.num_decoded),
        )


@dataclass
class Report:
    """One run of the benchmark. Times in seconds unless named otherwise, sizes in bytes."""

    model: str
    executor: str
    dtype: str
    date: str
    settings: dict[str, Any]
    device: dict[str, Any]
    load_s: float
    plan_bytes: dict[str, int]
    max_context: int
    quantization: list[str] = field(default_factory=list)
    draft: str | None = None
    """The draft; None: plain decoding."""
    simulated_accept: float | None = None
    """The accept length, if it was not measured but forced."""
    temperature: float = 0.0
    """The temperature of sampling; 0: greedy."""
    read_gb_per_s: float | None = None
    process_to_first_token_s: float | None = None
    cases: list[CaseReport] = field(default_factory=list)
    samples: Samples = field(default_factory=Samples)

    @property
    def speculation(self) -> list[str]:
        """The draft in words, for tables and plots; empty without one."""
        if self.draft is None:
            return []
        simulated = self.simulated_accept
        return [f"draft {self.draft}", *([] if simulated is None else [f"simulated accept length {simulated:g}"])]

    def record(self) -> dict[str, Any]:
        return {"versions": versions(), **asdict(self)}


def versions() -> dict[str, str]:
    """Return the versions of cpmrt, Python and the packages that a number can depend on."""
    found = {"cpmrt": __version__, "python": platform.python_version(), "system": platform.platform()}
    for dist in distributions():
        name = (dist.metadata["Name"] or "").lower()
        if name.startswith(_PACKAGES):
            found[name] = dist.version
    return found

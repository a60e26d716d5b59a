"""Samples power, clocks, temperature and load of the GPU while a benchmark runs.

NVML on desktop and server GPUs; what a board's NVML lacks is left out (Jetson's lacks most), and Jetson's own sysfs
files fill in what they have. Every reading is optional: a benchmark never fails for want of one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from cpmrt.bench.jetson import jetson_readers
from cpmrt.bench.samples import Samples

SAMPLES_PER_S = 20
_PATIENCE_S = 5.0
"""How long to wait at the end for a reading that hangs in the driver."""

Reader = Callable[[], float]


class Monitor:
    """Use as a context manager; `samples` holds what was seen.

    `bus_id` names the GPU as "0000:3B:00.0"; None is NVML's first. `sysfs` is where Jetson's files are looked for.
    """

    def __init__(self, bus_id: str | None = None, *, sysfs: Path = Path("/sys")):
        self.samples = Samples()
        self._nvml = Nvml(bus_id)
        # Only a reading that NVML gives replaces that of a file.
        self._readers = _working(jetson_readers(sysfs)) | _working(self._nvml.readers())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-monitor", daemon=True)

    @property
    def driver_version(self) -> str | None:
        """Of the NVIDIA driver, such as "580.65.06"; None if NVML does not say."""
        return self._nvml.driver_version

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(_PATIENCE_S)
        if not self._thread.is_alive():
            self._nvml.close()

    def _run(self) -> None:
        due = perf_counter()
        while not self._stop.wait(max(0.0, due - perf_counter())):
            due = perf_counter() + 1 / SAMPLES_PER_S
            row = {name: _read(reader) for name, reader in self._readers.items()}
            for name, value in row.items():
                self.samples.readings.setdefault(name, []).append(value)
            self.samples.times_s.append(due - 1 / SAMPLES_PER_S)


def _working(readers: dict[str, Reader]) -> dict[str, Reader]:
    return {name: reader for name, reader in readers.items() if _read(reader) is not None}


def _read(reader: Reader) -> float | None:
    # NVML's and sysfs's ways to say "not here" differ by board and version; a missing reading is never an error.
    try:
        return float(reader())
    except Exception:
        return None


def _handle(nvml: Any, bus_id: str | None) -> Any:
    """Boards without PCI answer to no bus id, but they have one GPU only."""
    try:
        return nvml.nvmlDeviceGetHandleByPciBusId(bus_id)
    except Exception:
        if bus_id is not None and nvml.nvmlDeviceGetCount() != 1:
            raise
        return nvml.nvmlDeviceGetHandleByIndex(0)


class Nvml:
    """NVML through nvidia-ml-py, or nothing where either is missing."""

    def __init__(self, bus_id: str | None):
        self.driver_version: str | None = None
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handle = _handle(pynvml, bus_id)
            self.driver_version = str(pynvml.nvmlSystemGetDriverVersion())
        except Exception:
            self.close()

    def readers(self) -> dict[str, Reader]:
        """Every reading that NVML defines; whether this board has it shows when it is called."""
        nvml = self._nvml
        if nvml is None:
            return {}
        handle = self._handle
        return {
            "power_w": self._power_w,
            "energy_j": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "utilisation_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "throttle_bits": self._throttle_bits,
        }

    def close(self) -> None:
        """Leave NVML. May be called again."""
        nvml, self._nvml = self._nvml, None
        try:
            if nvml is not None:
                nvml.nvmlShutdown()
        except Exception:
            return

    def _power_w(self) -> float:
        """The power of this moment; nvmlDeviceGetPowerUsage, the older call, is a mean over a second on new GPUs."""
        nvml = self._nvml
        try:
            field = nvml.nvmlDeviceGetFieldValues(self._handle, [nvml.NVML_FI_DEV_POWER_INSTANT])[0]
            if field.nvmlReturn == nvml.NVML_SUCCESS and field.value.uiVal:
                return float(field.value.uiVal) / 1000
        except Exception:
            pass
        return float(nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1000

    def _throttle_bits(self) -> float:
        """Drivers before 535 know the call by its first name only."""
        nvml = self._nvml
        try:
            return float(nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle))
        except Exception:
            return float(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))

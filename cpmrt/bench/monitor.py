"""Samples the readings of the GPU while a benchmark runs. A benchmark never fails for want of one."""

from __future__ import annotations

import threading
from pathlib import Path
from time import perf_counter

from cpmrt.bench.samples import Samples
from cpmrt.gpu_readings import GpuReadings

SAMPLES_PER_S = 20
_PATIENCE_S = 5.0
"""How long to wait at the end for a reading that hangs in the driver."""


class Monitor:
    """Samples the GPU while its `with` block runs; `samples` holds the readings. Arguments as of `GpuReadings`."""

    def __init__(self, bus_id: str | None = None, *, sysfs: Path = Path("/sys")):
        self.samples = Samples()
        self._gpu = GpuReadings(bus_id, sysfs=sysfs)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-monitor", daemon=True)

    @property
    def driver_version(self) -> str | None:
        """The version of the NVIDIA driver, such as "580.65.06"; None if NVML does not say."""
        return self._gpu.driver_version

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(_PATIENCE_S)
        if not self._thread.is_alive():
            self._gpu.close()

    def _run(self) -> None:
        due = perf_counter()
        while not self._stop.wait(max(0.0, due - perf_counter())):
            due = perf_counter() + 1 / SAMPLES_PER_S
            for name, value in self._gpu.read().items():
                self.samples.readings.setdefault(name, []).append(value)
            self.samples.times_s.append(due - 1 / SAMPLES_PER_S)

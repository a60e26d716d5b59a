"""Reads memory, power, energy, clocks, temperature and load of a GPU.

The readings come from NVML. A Jetson's NVML lacks most of them; its files in sysfs have GPU load and clock, temperature
and power. Every reading is optional: nothing fails for want of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_JETSON_GPUS = ("gpu", "ga10b", "gv11b", "gp10b")
"""Parts of the GPU's name in sysfs: on Orin and Thor, then those of older kernels on Orin, Xavier and TX2."""

Reader = Callable[[], float]


class GpuReadings:
    """The readings that one GPU has.

    `bus_id` names the GPU as "0000:3B:00.0"; None is NVML's first. Jetson's files are looked for under `sysfs`.
    """

    def __init__(self, bus_id: str | None = None, *, sysfs: Path = Path("/sys")):
        self._nvml = Nvml(bus_id)
        # Only a reading that NVML gives replaces that of a file.
        self._readers = _working(jetson_readers(sysfs)) | _working(self._nvml.readers())

    @property
    def driver_version(self) -> str | None:
        """The version of the NVIDIA driver, such as "580.65.06"; None if NVML does not say."""
        return self._nvml.driver_version

    @property
    def memory_bytes(self) -> int | None:
        """The size of the GPU's memory; None if NVML does not say."""
        return self._nvml.memory_bytes

    def read(self) -> dict[str, float | None]:
        """Return every reading that worked at first, by its name, which ends with its unit; None where it fails now."""
        return {name: _read(reader) for name, reader in self._readers.items()}

    def close(self) -> None:
        """Leave NVML. May be called again."""
        self._nvml.close()


def _working(readers: dict[str, Reader]) -> dict[str, Reader]:
    return {name: reader for name, reader in readers.items() if _read(reader) is not None}


def _read(reader: Reader) -> float | None:
    # NVML's and sysfs's ways to say "not here" differ by board and version; a missing reading is never an error.
    try:
        return float(reader())
    except Exception:
        return None


def _handle(nvml: Any, bus_id: str | None) -> Any:
    """Find the GPU with a bus id. Boards without PCI have no bus ids, but one GPU only."""
    try:
        return nvml.nvmlDeviceGetHandleByPciBusId(bus_id)
    except Exception:
        if bus_id is not None and nvml.nvmlDeviceGetCount() != 1:
            raise
        return nvml.nvmlDeviceGetHandleByIndex(0)


class Nvml:
    """Reads NVML through nvidia-ml-py; it has no readings where either is missing."""

    def __init__(self, bus_id: str | None):
        self.driver_version: str | None = None
        self.memory_bytes: int | None = None
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handle = _handle(pynvml, bus_id)
            self.driver_version = str(pynvml.nvmlSystemGetDriverVersion())
        except Exception:
            self.close()
            return
        with suppress(Exception):
            self.memory_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).total)

    def readers(self) -> dict[str, Reader]:
        """Return a function for every reading that NVML defines, also for those that this board lacks."""
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
        """Read the power of now; nvmlDeviceGetPowerUsage, the older call, is a mean over a second on new GPUs."""
        nvml = self._nvml
        try:
            field = nvml.nvmlDeviceGetFieldValues(self._handle, [nvml.NVML_FI_DEV_POWER_INSTANT])[0]
            if field.nvmlReturn == nvml.NVML_SUCCESS and field.value.uiVal:
                return float(field.value.uiVal) / 1000
        except Exception:
            pass
        return float(nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1000

    def _throttle_bits(self) -> float:
        """Read the throttle reasons. Drivers before 535 have the call under its older name only."""
        nvml = self._nvml
        try:
            return float(nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle))
        except Exception:
            return float(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))


def jetson_readers(sysfs: Path) -> dict[str, Reader]:
    """Return the readers of a Jetson board, by the same names as NVML's; none on other machines. Raises nothing."""
    try:
        return dict(_jetson_found(sysfs))
    except OSError:
        return {}


def _jetson_found(sysfs: Path) -> Iterator[tuple[str, Reader]]:
    for device in sorted((sysfs / "class/devfreq").glob("*")):
        if any(part in device.name for part in _JETSON_GPUS):
            yield "sm_clock_mhz", _scaled(device / "cur_freq", 1e-6)
            yield "utilisation_percent", _scaled(device / "device/load", 0.1)
    for kind in sorted((sysfs / "class/thermal").glob("thermal_zone*/type")):
        if "gpu" in _text(kind).lower():
            yield "temperature_c", _scaled(kind.parent / "temp", 1e-3)
    rails = dict(_rails(sysfs))
    if rails:
        # Boards without a sensor at the input have one on each rail.
        measured = [rails["VDD_IN"]] if "VDD_IN" in rails else list(rails.values())
        yield "power_w", lambda: sum(volt() * ampere() for volt, ampere in measured)


def _rails(sysfs: Path) -> Iterator[tuple[str, tuple[Reader, Reader]]]:
    """Yield the readers of volts and amperes of every channel of the INA3221 power monitors, by its label."""
    for name in sorted((sysfs / "class/hwmon").glob("hwmon*/name")):
        if _text(name) != "ina3221":
            continue
        for current in sorted(name.parent.glob("curr[123]_input")):
            channel = current.name[4]
            label = _text(name.parent / f"in{channel}_label")
            if label:
                yield label, (_scaled(name.parent / f"in{channel}_input", 1e-3), _scaled(current, 1e-3))


def _scaled(file: Path, unit: float) -> Reader:
    return lambda: int(file.read_text()) * unit


def _text(file: Path) -> str:
    """Return the text of a file, '' where it cannot be read."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""

"""Readings of a Jetson board from sysfs, which has what its NVML lacks: GPU load and clock, temperature, power."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

_GPU_DEVICES = ("gpu", "ga10b", "gv11b", "gp10b")
"""Parts of the device's name: Orin and Thor, then older kernels' names of Orin, Xavier and TX2."""


def jetson_readers(sysfs: Path) -> dict[str, Callable[[], float]]:
    """Functions that read a value, by the same names as NVML's; none on other machines. Raises nothing itself."""
    try:
        return dict(_found(sysfs))
    except OSError:
        return {}


def _found(sysfs: Path) -> Iterator[tuple[str, Callable[[], float]]]:
    for device in sorted((sysfs / "class/devfreq").glob("*")):
        if any(part in device.name for part in _GPU_DEVICES):
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


def _rails(sysfs: Path) -> Iterator[tuple[str, tuple[Callable[[], float], Callable[[], float]]]]:
    """Volts and amperes of every channel of the board's INA3221 power monitors, by the channel's label."""
    for name in sorted((sysfs / "class/hwmon").glob("hwmon*/name")):
        if _text(name) != "ina3221":
            continue
        for current in sorted(name.parent.glob("curr[123]_input")):
            channel = current.name[4]
            label = _text(name.parent / f"in{channel}_label")
            if label:
                yield label, (_scaled(name.parent / f"in{channel}_input", 1e-3), _scaled(current, 1e-3))


def _scaled(file: Path, unit: float) -> Callable[[], float]:
    return lambda: int(file.read_text()) * unit


def _text(file: Path) -> str:
    """What a file says, '' where it cannot be read."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""

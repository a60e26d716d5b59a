"""Checks of `cpmrt doctor` for CUDA: driver, devices, NVML, wheels, NVRTC. Nothing here imports CuPy.

A machine without a GPU needs none of it: what is absent there is reported as unused.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from itertools import chain
from typing import Any

from cpmrt.byte_sizes import format_bytes
from cpmrt.cli.host_probes import Finding, Status
from cpmrt.installation import pip_install

_WHEELS = (
    "cupy", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cublas",
)  # fmt: skip
_NO_DEVICE, _DRIVER_MISMATCH = 100, 803
_DRIVER_FIXES = {
    _NO_DEVICE: "nvidia-smi (it must list the GPU; in a container: docker run --gpus all ...)",
    _DRIVER_MISMATCH: "sudo reboot (the kernel module and the driver library are of different versions)",
}
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
"""The attributes CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h."""


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver: its CUDA version (12080 for CUDA 12.8, 0 if no driver works) and the findings about it."""

    cuda_version: int
    findings: tuple[Finding, ...]


def driver() -> Driver:
    """Ask libcuda, by ctypes, for its CUDA version and its devices."""
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        fix = "for an NVIDIA GPU: sudo apt install nvidia-driver (Debian), sudo ubuntu-drivers install (Ubuntu)"
        return Driver(0, (Finding("NVIDIA driver", Status.UNUSED, "not installed (no libcuda.so.1)", fix),))
    error = libcuda.cuInit(0)
    if error:
        found = f"cuInit fails with {_error_name(libcuda, error)} ({error})"
        return Driver(0, (Finding("NVIDIA driver", Status.UNUSED, found, _DRIVER_FIXES.get(error, "nvidia-smi")),))
    version = _integer(libcuda.cuDriverGetVersion)
    found = f"works, CUDA {version // 1000}.{version % 1000 // 10}"
    return Driver(version, (Finding("NVIDIA driver", Status.OK, found), *_devices(libcuda)))


def nvml(driver: Driver) -> Finding:
    """Report NVML, the library behind nvidia-smi, which the optional package pynvml loads."""
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        return _absent("NVML", "pynvml is not installed", driver, "nvidia-ml-py")
    try:
        pynvml.nvmlInit()
        return Finding("NVML", Status.OK, f"driver {pynvml.nvmlSystemGetDriverVersion()}")
    except pynvml.NVMLError as error:
        return Finding("NVML", Status.UNUSED, f"does not start: {error}")


def cuda_wheels(driver: Driver) -> Iterator[Finding]:
    """Report the installed packages of CUDA with their versions."""
    installed = {dist.metadata["Name"].lower(): dist.version for dist in distributions() if dist.metadata["Name"]}
    series = f"cu{driver.cuda_version // 1000}" if driver.cuda_version else "cu13"
    for wheel in _WHEELS:
        found = {name: installed[name] for name in sorted(installed) if _is_of_family(name, wheel)}
        if found:
            yield Finding(wheel, Status.OK, ", ".join(f"{name} {version}" for name, version in found.items()))
        else:
            yield _absent(wheel, "not installed", driver, _package(wheel, series))


def nvrtc(driver: Driver) -> Finding:
    """Report whether the run-time compiler can be loaded, and its version."""
    for path in _nvrtc_libraries():
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        major, minor = ctypes.c_int(0), ctypes.c_int(0)
        if library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0:
            return Finding("NVRTC", Status.OK, f"{major.value}.{minor.value} ({path})")
    series = f"cu{driver.cuda_version // 1000}" if driver.cuda_version else "cu13"
    return _absent("NVRTC", "no libnvrtc that loads", driver, _package("nvidia-cuda-nvrtc", series))


def _devices(libcuda: Any) -> Iterator[Finding]:
    for index in range(_integer(libcuda.cuDeviceGetCount)):
        device, name, size = ctypes.c_int(0), ctypes.create_string_buffer(256), ctypes.c_size_t(0)
        libcuda.cuDeviceGet(ctypes.byref(device), index)
        libcuda.cuDeviceGetName(name, len(name), device)
        libcuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        major = _integer(libcuda.cuDeviceGetAttribute, _CAPABILITY_MAJOR, device)
        minor = _integer(libcuda.cuDeviceGetAttribute, _CAPABILITY_MINOR, device)
        label = name.value.decode("utf-8", "replace")
        found = f"{label}, compute capability {major}.{minor}, {format_bytes(size.value)}"
        yield Finding(f"GPU {index}", Status.OK, found)


def _integer(call: Any, *arguments: Any) -> int:
    """Return the int that a driver call writes to the pointer in its first argument; 0 if the call fails."""
    value = ctypes.c_int(0)
    return 0 if call(ctypes.byref(value), *arguments) else value.value


def _error_name(libcuda: Any, error: int) -> str:
    name = ctypes.c_char_p()
    libcuda.cuGetErrorName(error, ctypes.byref(name))
    return (name.value or b"an unknown error").decode()


def _is_of_family(name: str, wheel: str) -> bool:
    """Whether a distribution is `wheel`, perhaps with the CUDA series in its name (cupy-cuda13x, ...-cu12)."""
    return name == wheel or name.startswith((f"{wheel}-cuda", f"{wheel}-cu1"))


def _package(wheel: str, series: str) -> str:
    """Return the name to install: CuPy and NVIDIA's CUDA 12 wheels carry the series in it, CUDA 13 wheels do not."""
    if wheel == "cupy":
        return f"cupy-cuda{series[2:]}x"
    return f"{wheel}-{series}" if wheel.startswith("nvidia-") and series == "cu12" else wheel


def _absent(subject: str, found: str, driver: Driver, package: str) -> Finding:
    if driver.cuda_version:
        return Finding(subject, Status.MISSING, found, pip_install(package))
    return Finding(subject, Status.UNUSED, f"{found}; of use with an NVIDIA driver only")


def _nvrtc_libraries() -> Iterator[str]:
    """Yield candidates for NVRTC's library: those of the wheels, the newest first, then those of the dynamic linker.

    No older one may be loaded as well: the bindings compile with the library that is in the process already.
    """
    wheels = (dist for dist in distributions() if _is_of_family((dist.metadata["Name"] or "").lower(), _WHEELS[3]))
    files = chain.from_iterable(dist.files or () for dist in wheels)
    found = (file for file in files if file.name.startswith("libnvrtc.so"))
    yield from (str(file.locate()) for file in sorted(found, key=lambda file: file.name, reverse=True))
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")

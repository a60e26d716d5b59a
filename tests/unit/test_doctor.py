"""`cpmrt doctor`: its findings on machines of all kinds, the missing parts it names, and the commands that mend
them."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from cpmrt import env, installation
from cpmrt.cli import gpu_probes, host_probes
from cpmrt.cli.host_probes import Status
from cpmrt.cli.main import main
from cpmrt.weights.hub import BUNDLED

NO_DRIVER = gpu_probes.Driver(0, ())


def test_doctor(capsys):
    code = main(["doctor"])
    out, err = capsys.readouterr()
    assert code == 0 and err == ""
    for subject in ("Python", "NumPy", "BLAS", "NVIDIA driver", "NVRTC", "cache folder", "bundled model", "cuda-core"):
        assert subject in out
    assert "auto: NumPy, for the bundled model only" in out or "auto: CUDA on" in out


def json_of_doctor(capsys):
    """Run `cpmrt doctor --json` and return its exit code and its JSON object."""
    code = main(["doctor", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_doctor_json(capsys):
    code, record = json_of_doctor(capsys)
    assert code == 0 and record["can_run"] is True
    assert {finding["status"] for finding in record["findings"]} <= {status.value for status in Status}
    model = next(finding for finding in record["findings"] if finding["subject"] == "bundled model")
    assert (model["status"] == "ok") == (BUNDLED / "model.safetensors").exists() and (model["status"] == "ok") != bool(
        model["fix"]
    )


def test_doctor_fails_where_cpmrt_cannot_run(monkeypatch, capsys):
    monkeypatch.setattr(host_probes, "installed_version", lambda package: None)
    assert main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert "-m pip install 'tokenizers>=0.20'" in out and err.startswith("cpmrt: error: ") and err.count("\n") == 1


@pytest.mark.parametrize("package", ["threadpoolctl", "shtab", "markdown-it-py", "prompt-toolkit"])
def test_doctor_knows_every_package_that_is_required(monkeypatch, package):
    found = host_probes.installed_version
    monkeypatch.setattr(host_probes, "installed_version", lambda name: None if name == package else found(name))
    broken = [finding for finding in host_probes.required_packages() if finding.status is Status.BROKEN]
    assert [finding.subject for finding in broken] == [package] and f"'{package}>=" in broken[0].fix


def test_doctor_in_sources_that_are_not_installed(monkeypatch, capsys):
    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installation, "requires", absent)
    assert main(["doctor"]) == 0
    assert "unknown: cpmrt runs from its sources" in capsys.readouterr().out


def test_doctor_tells_what_is_broken_from_what_nobody_needs(monkeypatch, capsys):
    absent = {"llguidance", "uvicorn"}
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else found(name))
    monkeypatch.setattr(host_probes, "cache_folder", lambda: host_probes.Finding("x", Status.MISSING, "y", "mend x"))
    assert main(["doctor"]) == 0
    mend, _, add = capsys.readouterr().out.partition("\nto mend:\n")[2].partition("\nto use what is unused here:\n")
    assert "mend x" in mend and "pip install 'llguidance" not in mend
    assert add.count("llguidance") == 1 and "pip install 'uvicorn>=" in add


def test_what_is_broken_is_the_exit_code_of_both_reports(monkeypatch, capsys):
    monkeypatch.setattr(host_probes, "cache_folder", lambda: host_probes.Finding("x", Status.BROKEN, "y", "mend x"))
    assert main(["doctor"]) == 1
    assert "cpmrt cannot run here" in capsys.readouterr().err
    code, record = json_of_doctor(capsys)
    assert code == 1 and record["can_run"] is False


@pytest.mark.parametrize(("extra", "package", "needed_by"), [
    ("server", "uvicorn", "which cpmrt serve needs"),
    ("grammar", "llguidance", "which answers with a form (--json-schema, --regex, ...) need"),
])  # fmt: skip
def test_doctor_reports_the_packages_of_extras(monkeypatch, capsys, extra, package, needed_by):
    def finding() -> dict:
        findings = json_of_doctor(capsys)[1]["findings"]
        return next(finding for finding in findings if finding["subject"] == f"packages for {extra}")

    assert finding()["status"] == "ok" and re.search(rf"{package} \d", finding()["found"])
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    absent = finding()
    assert absent["status"] == "unused" and f"{package} not installed, {needed_by}" in absent["found"]
    if extra == "server":
        assert absent["fix"].endswith("-m pip install 'uvicorn>=0.30'")


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("CPMRT_CACHE_DIR", str(tmp_path / "new"))
    assert "not made yet" in host_probes.cache_folder().found
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "a.cubin").write_bytes(b"x" * 2048)
    assert host_probes.cache_folder().found.endswith("new: 2.00 KiB, writable")
    monkeypatch.setenv("CPMRT_CACHE_DIR", str(tmp_path / "new" / "a.cubin"))
    blocked = host_probes.cache_folder()
    assert blocked.status is Status.MISSING and "CPMRT_CACHE_DIR" in blocked.fix


def test_a_cache_folder_with_a_name_that_no_file_can_have(monkeypatch, tmp_path):
    monkeypatch.setenv("CPMRT_CACHE_DIR", str(tmp_path / ("x" * 300)))
    assert "too long" in host_probes.cache_folder().found
    assert "none yet" in host_probes.compiled_kernels().found


def test_a_cubin_that_vanishes_hides_no_other(monkeypatch, tmp_path):
    monkeypatch.setenv("CPMRT_CACHE_DIR", str(tmp_path))
    (tmp_path / "cubins").mkdir()
    for name in "ac":
        (tmp_path / "cubins" / f"{name}.cubin").write_bytes(b"x" * 512)
    (tmp_path / "cubins" / "b.cubin").symlink_to(tmp_path / "absent")
    assert host_probes.compiled_kernels().found.startswith("2 modules, 1.00 KiB")


def test_a_user_without_a_home(monkeypatch, capsys):
    """A user without a home, as in a container that does not know its user id, gets the folders that HOME=/ gives."""
    for name in ("HOME", "CPMRT_CACHE_DIR", "CPMRT_STATE_DIR", "CUPY_CACHE_DIR", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert (env.cache_dir(), env.state_dir()) == (Path("/.cache/cpmrt"), Path("/.local/state/cpmrt"))
    assert env.cupy_cache_dir() == Path("/.cupy/kernel_cache")
    assert "/.cache/cpmrt" in host_probes.cache_folder().found
    assert main(["plan"]) == 0 and os.environ["HOME"] == "/"  # for the clients of the hubs, which ask for it too


@pytest.mark.parametrize("variable, folder", [
    ("CPMRT_CACHE_DIR", env.cache_dir), ("CPMRT_STATE_DIR", env.state_dir), ("CPMRT_KERNELS_DIR", env.kernels_dir),
])  # fmt: skip
def test_a_tilde_that_no_shell_has_replaced_is_the_home_folder(monkeypatch, variable, folder):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv(variable, "~/kept")
    assert folder() == Path("/home/somebody/kept")
    monkeypatch.setenv(variable, "/elsewhere/~/kept")
    assert folder() == Path("/elsewhere/~/kept")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.setenv(variable, "~/kept")
    assert folder() == Path("/kept")


DRIVER_SOURCE = """
#include <string.h>
static int failure = FAILURE;
int cuInit(unsigned flags) { return failure; }
int cuDriverGetVersion(int *v) { *v = 12080; return 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *s, int n, int d) { strncpy(s, "Orin", n); return 0; }
int cuDeviceTotalMem_v2(unsigned long *m, int d) { *m = 8ul << 30; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 8 : 7; return 0; }
int cuGetErrorName(int e, const char **s) { *s = "CUDA_ERROR_NO_DEVICE"; return 0; }
"""


def fake_driver(tmp_path, monkeypatch, failure):
    """Build a libcuda that fails as `failure` says, and have ctypes load it."""
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    source.write_text(DRIVER_SOURCE)
    try:
        command = ["cc", "-shared", "-fPIC", f"-DFAILURE={failure}", "-o", library, source]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: load(str(library) if name == "libcuda.so.1" else name))


def test_a_driver_that_works(tmp_path, monkeypatch):
    fake_driver(tmp_path, monkeypatch, 0)
    driver = gpu_probes.driver()
    assert driver.cuda_version == 12080 and driver.findings[0].found == "works, CUDA 12.8"
    assert [finding.found for finding in driver.findings[1:]] == ["Orin, compute capability 8.7, 8.00 GiB"] * 2
    fixes = [finding.fix for finding in gpu_probes.cuda_wheels(driver) if finding.status is Status.MISSING]
    assert all("-m pip install " in fix for fix in fixes)


def test_a_driver_without_a_device(tmp_path, monkeypatch):
    fake_driver(tmp_path, monkeypatch, 100)
    driver = gpu_probes.driver()
    assert driver.cuda_version == 0 and "CUDA_ERROR_NO_DEVICE (100)" in driver.findings[0].found
    assert driver.findings[0].fix.startswith("nvidia-smi")


def test_no_driver(monkeypatch):
    def absent(name):
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", absent)
    driver = gpu_probes.driver()
    assert driver.cuda_version == 0 and "not installed" in driver.findings[0].found and driver.findings[0].fix
    assert gpu_probes.nvrtc(driver).status is Status.UNUSED


@pytest.mark.parametrize(
    ("series", "names"),
    [
        (12080, {"cupy-cuda12x", "nvidia-cuda-nvrtc-cu12", "nvidia-cublas-cu12", "cuda-core", "cuda-bindings"}),
        (13000, {"cupy-cuda13x", "nvidia-cuda-nvrtc", "nvidia-cublas", "cuda-core", "cuda-bindings"}),
    ],
)
def test_missing_wheels_are_named_for_the_driver(monkeypatch, series, names):
    monkeypatch.setattr(gpu_probes, "distributions", list)
    fixes = [finding.fix.split()[-1] for finding in gpu_probes.cuda_wheels(gpu_probes.Driver(series, ()))]
    assert names <= set(fixes) and len(fixes) == 6
    assert all(finding.fix == "" for finding in gpu_probes.cuda_wheels(NO_DRIVER))


def test_installed_wheels_of_every_spelling(monkeypatch):
    installed = ["cupy-cuda12x", "nvidia-cuda-nvrtc-cu12", "cuda-core", "nvidia-cublas", "cupyx-other"]
    dists = [SimpleNamespace(metadata={"Name": name}, version="1.0", files=None) for name in installed]
    monkeypatch.setattr(gpu_probes, "distributions", lambda: dists)
    found = {finding.subject: finding.found for finding in gpu_probes.cuda_wheels(NO_DRIVER)}
    assert found["cupy"] == "cupy-cuda12x 1.0" and found["nvidia-cublas"] == "nvidia-cublas 1.0"
    assert found["nvidia-cuda-nvrtc"] == "nvidia-cuda-nvrtc-cu12 1.0" and "not installed" in found["cuda-bindings"]


def test_nvrtc_of_a_wheel(tmp_path, monkeypatch):
    source, library = tmp_path / "n.c", tmp_path / "libnvrtc.so.13"
    source.write_text("int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 2; return 0; }")
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("no C compiler")

    class Packaged(type(Path())):
        def locate(self):
            return tmp_path / self.name

    older = shutil.copy(library, tmp_path / "libnvrtc.so.12")
    files = [Packaged(older.name), Packaged(library.name)]
    dist = SimpleNamespace(metadata={"Name": "nvidia-cuda-nvrtc"}, version="13.2", files=files)
    monkeypatch.setattr(gpu_probes, "distributions", lambda: [dist])
    assert gpu_probes.nvrtc(NO_DRIVER).found == f"13.2 ({library})"

"""The benchmark's monitor: its readings from NVML and from a Jetson's files, and faults that must not stop a
benchmark."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from time import perf_counter

import pytest
from fake_nvml import BUS_ID, FakeNvml
from timing import until

from cpmrt.bench import monitor as monitor_module
from cpmrt.bench.monitor import Monitor
from cpmrt.bench.samples import Samples
from cpmrt.gpu_readings import GpuReadings, Nvml, jetson_readers


@pytest.fixture
def nvml(monkeypatch):
    """Return a function that puts a fake NVML in the place of pynvml."""

    def install(*missing, **settings):
        fake = FakeNvml(*missing, **settings)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


def watch(tmp_path, seconds=0.2, bus_id=BUS_ID):
    """Return a monitor whose samples are of so many seconds at least, however late its thread gets a core."""
    with Monitor(bus_id, sysfs=tmp_path) as monitor:
        until(lambda: len(times := monitor.samples.times_s) > 1 and times[-1] - times[0] >= seconds)
    return monitor


def test_every_reading_of_a_server_gpu(nvml, tmp_path):
    fake = nvml()
    monitor = watch(tmp_path)
    samples = monitor.samples
    assert monitor.driver_version == "580.65.06" and fake.calls == ["init", "shutdown"]
    means = {name: samples.mean(name) for name in samples.readings if name != "energy_j"}
    assert means == {
        "power_w": 700, "temperature_c": 55, "sm_clock_mhz": 1980, "memory_clock_mhz": 3201,
        "utilisation_percent": 97, "memory_used_bytes": 17 << 30, "throttle_bits": 5,
    }  # fmt: skip
    assert samples.throttle_reasons() == ("power cap",)


def test_sampling_is_ten_a_second_or_faster(nvml, tmp_path):
    nvml()
    samples = watch(tmp_path, 1.0).samples
    assert len(samples.times_s) >= 10
    assert all(len(values) == len(samples.times_s) for values in samples.readings.values())


def test_older_drivers_are_asked_in_their_words(nvml, tmp_path):
    nvml("nvmlDeviceGetFieldValues", "nvmlDeviceGetCurrentClocksEventReasons")
    samples = watch(tmp_path).samples
    assert samples.mean("power_w") == 400 and samples.throttle_reasons() == ("hardware thermal slowdown",)


def test_a_board_without_instant_power_gives_its_mean(nvml, tmp_path):
    nvml().instant_mw = 0
    assert watch(tmp_path).samples.mean("power_w") == 400


READINGS = [name for name in dir(FakeNvml) if name.startswith("nvmlDeviceGet") and "Handle" not in name]


@pytest.mark.parametrize("missing", READINGS)
def test_any_one_reading_may_be_missing(nvml, tmp_path, missing):
    nvml(missing)
    assert watch(tmp_path, 0.06).samples.times_s


def test_all_readings_may_be_missing(nvml, tmp_path):
    nvml(*READINGS)
    assert watch(tmp_path).samples.readings == {}


@pytest.mark.parametrize("missing", ["nvmlInit", "nvmlSystemGetDriverVersion", "nvmlDeviceGetHandleByIndex"])
def test_an_nvml_that_does_not_start_is_nothing(nvml, tmp_path, missing):
    nvml(missing, "nvmlDeviceGetHandleByPciBusId")
    monitor = watch(tmp_path)
    assert monitor.samples.readings == {} and monitor.driver_version is None


def test_no_pynvml_is_nothing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert watch(tmp_path).samples.readings == {}


def test_a_failing_shutdown_is_nothing(nvml, tmp_path):
    nvml("nvmlShutdown")
    assert watch(tmp_path).samples.times_s


def test_the_gpu_is_found_by_its_bus_id_or_by_being_the_only_one(nvml, tmp_path):
    nvml(count=2)
    assert Nvml(BUS_ID)._handle == "by bus id"
    assert Nvml("0000:99:00.0").readers() == {}, "another GPU's figures would be wrong"
    nvml(count=1)
    assert Nvml("0000:00:00.0")._handle == "index 0"


def test_a_reading_that_hangs_does_not_hang_the_end(nvml, tmp_path, monkeypatch):
    fake, begun, forever = nvml(), threading.Event(), threading.Event()
    monkeypatch.setattr(monitor_module, "_PATIENCE_S", 0.1)
    monitor = Monitor(BUS_ID, sysfs=tmp_path)
    fake.nvmlDeviceGetTemperature = lambda *arguments: begun.set() or forever.wait()
    with monitor:
        assert begun.wait(30)
    assert fake.calls == ["init"], "NVML is not shut down under a call that runs"
    forever.set()


def test_an_error_in_the_benchmark_comes_through(nvml, tmp_path):
    fake = nvml()
    with pytest.raises(KeyError), Monitor(BUS_ID, sysfs=tmp_path):
        raise KeyError("x")
    assert fake.calls == ["init", "shutdown"]


def board(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


ORIN = {
    "class/devfreq/17000000.gpu/cur_freq": "1300500000\n",
    "class/devfreq/17000000.gpu/device/load": "875\n",
    "class/devfreq/15340000.vic/cur_freq": "115200000\n",
    "class/thermal/thermal_zone0/type": "cpu-thermal\n",
    "class/thermal/thermal_zone0/temp": "41000\n",
    "class/thermal/thermal_zone1/type": "gpu-thermal\n",
    "class/thermal/thermal_zone1/temp": "52500\n",
    "class/hwmon/hwmon3/name": "ina3221\n",
    "class/hwmon/hwmon3/in1_label": "VDD_IN\n",
    "class/hwmon/hwmon3/in1_input": "5000\n",
    "class/hwmon/hwmon3/curr1_input": "4200\n",
    "class/hwmon/hwmon3/in2_label": "VDD_CPU_GPU_CV\n",
    "class/hwmon/hwmon3/in2_input": "5000\n",
    "class/hwmon/hwmon3/curr2_input": "2000\n",
    "class/hwmon/hwmon0/name": "corsairpsu\n",
    "class/hwmon/hwmon0/in1_label": "VDD_IN\n",
    "class/hwmon/hwmon0/in1_input": "230000\n",
    "class/hwmon/hwmon0/curr1_input": "9000\n",
}


def read_all(root):
    return {name: pytest.approx(reader()) for name, reader in jetson_readers(root).items()}


def test_a_jetson_is_read_from_its_files(tmp_path):
    assert read_all(board(tmp_path, **ORIN)) == {
        "sm_clock_mhz": 1300.5, "utilisation_percent": 87.5, "temperature_c": 52.5, "power_w": 21.0,
    }  # fmt: skip


def test_a_board_without_an_input_sensor_sums_its_rails(tmp_path):
    files = ORIN | {"class/hwmon/hwmon3/in1_label": "VDD_GPU_SOC\n"}
    assert read_all(board(tmp_path, **files))["power_w"] == 21.0 + 10.0


def test_older_kernels_name_the_gpu_otherwise(tmp_path):
    files = {"class/devfreq/17000000.ga10b/cur_freq": "114750000"}
    assert jetson_readers(board(tmp_path, **files))["sm_clock_mhz"]() == pytest.approx(114.75)


def test_jetson_files_fill_in_what_nvml_lacks(nvml, tmp_path):
    nvml("nvmlDeviceGetPowerUsage", "nvmlDeviceGetFieldValues", "nvmlDeviceGetUtilizationRates",
         "nvmlDeviceGetTotalEnergyConsumption")  # fmt: skip
    samples = watch(board(tmp_path, **ORIN), 0.7).samples
    assert samples.mean("utilisation_percent") == pytest.approx(87.5)
    assert samples.mean("power_w") == pytest.approx(21.0)
    span = (samples.times_s[0], samples.times_s[-1])
    assert samples.energy_j([span]) == pytest.approx(21.0 * (span[1] - span[0]))


@pytest.mark.parametrize("damaged", sorted(ORIN))
def test_any_file_may_be_unreadable_or_nonsense(tmp_path, damaged):
    board(tmp_path, **ORIN)
    path = tmp_path / damaged
    path.write_bytes(b"\xff\n")
    assert watch_files(tmp_path) >= 2
    path.unlink()
    path.mkdir()
    assert watch_files(tmp_path) >= 2


def watch_files(root):
    """Return the number of readings under `root`."""
    return len(GpuReadings(sysfs=root).read())


@pytest.fixture(autouse=True)
def no_real_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)


def test_an_absent_sysfs_is_nothing(tmp_path):
    assert jetson_readers(tmp_path / "absent") == {}


def ramp(**readings):
    """Return samples at 0, 0.1, ... 2.0 s, each reading a function of the time."""
    times = [index / 10 for index in range(21)]
    return Samples(times, {name: [function(time) for time in times] for name, function in readings.items()})


def test_energy_is_the_difference_of_the_counter():
    samples = ramp(energy_j=lambda time: 1000 + 300 * time, power_w=lambda time: 1.0)
    assert samples.energy_j([(0.25, 1.0), (1.55, 1.95)]) == pytest.approx(300 * 1.15)
    assert samples.energy_j([(0.0, 2.1)]) == pytest.approx(630)


def test_energy_without_a_counter_is_power_over_time():
    samples = ramp(power_w=lambda time: 100 + 100 * time)
    assert samples.energy_j([(0.0, 2.0)]) == pytest.approx(400)


@pytest.mark.parametrize("spans", [[], [(0.5, 0.9)], [(0.0, 3.0)], [(-1.0, 1.0)]], ids=str)
def test_energy_of_a_moment_or_of_unwatched_time_is_unknown(spans):
    assert ramp(energy_j=lambda time: time, power_w=lambda time: 1.0).energy_j(spans) is None


def test_a_counter_that_begins_too_late_leaves_the_energy_to_the_power():
    samples = ramp(energy_j=lambda time: None if time < 1 else 5000 * time, power_w=lambda time: 100)
    assert samples.energy_j([(0.0, 2.0)]) == pytest.approx(200)


@pytest.mark.parametrize(("bit", "reason"), [
    (0x1, ()), (0x2, ()), (0x4, ("power cap",)), (0x8, ("hardware slowdown",)), (0x10, ("sync boost",)),
    (0x20, ("software thermal slowdown",)), (0x40, ("hardware thermal slowdown",)), (0x80, ("power brake",)),
    (0x100, ()),
])  # fmt: skip
def test_reasons_are_the_bits_of_nvml(bit, reason):
    """nvml.h: idle is 1, application clocks 2, display clocks 0x100; none of these holds the clocks down."""
    assert ramp(throttle_bits=lambda time: bit).throttle_reasons() == reason


def test_a_sample_has_the_time_at_which_it_was_taken(nvml, tmp_path):
    nvml()
    before = perf_counter()
    monitor = watch(tmp_path, 0.0)
    after = perf_counter()
    assert all(before <= time <= after for time in monitor.samples.times_s)


def test_means_and_reasons_are_those_of_the_spans():
    samples = ramp(power_w=lambda time: 10 if time < 1 else 50, throttle_bits=lambda time: 0x4 if time < 1 else 0x21)
    assert samples.mean("power_w", [(0.0, 0.95)]) == 10 and samples.mean("power_w", [(1.0, 2.0)]) == 50
    assert samples.throttle_reasons([(0.0, 0.95)]) == ("power cap",)
    assert samples.throttle_reasons([(1.0, 2.0)]) == ("software thermal slowdown",)
    assert samples.mean("power_w", [(5.0, 6.0)]) is None and samples.mean("absent") is None


def test_failed_readings_leave_the_others():
    samples = Samples([0.0, 1.0, 2.0], {"power_w": [None, 5.0, 7.0]})
    assert samples.mean("power_w") == 6 and samples.points("power_w") == [(1.0, 5.0), (2.0, 7.0)]

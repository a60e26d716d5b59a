"""A stand-in for nvidia-ml-py that needs no GPU."""

from __future__ import annotations

from types import SimpleNamespace

BUS_ID = "0000:3B:00.0"


class FakeNvml:
    """The functions of nvidia-ml-py that cpmrt uses; `missing` names those that this board refuses."""

    NVML_SUCCESS, NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 0, 1, 2
    NVML_FI_DEV_POWER_INSTANT = 186

    def __init__(self, *missing: str, count: int = 1):
        self.missing, self.count, self.calls = set(missing), count, []
        self.joules, self.bits, self.instant_mw = 0.0, 0x5, 700_000

    def __getattribute__(self, name):
        if name.startswith("nvml") and name in self.missing:

            def refuse(*arguments):
                raise RuntimeError(f"{name}: Not Supported")

            return refuse
        return super().__getattribute__(name)

    def nvmlInit(self):
        self.calls.append("init")

    def nvmlShutdown(self):
        self.calls.append("shutdown")

    def nvmlDeviceGetCount(self):
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index):
        return f"index {index}"

    def nvmlDeviceGetHandleByPciBusId(self, bus_id):
        if bus_id != BUS_ID:
            raise RuntimeError("not found")
        return "by bus id"

    def nvmlSystemGetDriverVersion(self):
        return "580.65.06"

    def nvmlDeviceGetPowerUsage(self, handle):
        return 400_000

    def nvmlDeviceGetFieldValues(self, handle, fields):
        assert fields == [self.NVML_FI_DEV_POWER_INSTANT]
        return [SimpleNamespace(nvmlReturn=0 if self.instant_mw else 3, value=SimpleNamespace(uiVal=self.instant_mw))]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        self.joules += 10
        return int(self.joules * 1000)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 55

    def nvmlDeviceGetClockInfo(self, handle, clock):
        return {1: 1980, 2: 3201}[clock]

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=97, memory=80)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=17 << 30, total=80 << 30)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self.bits

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 0x40

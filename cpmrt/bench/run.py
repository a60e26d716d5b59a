"""Runs one benchmark: it measures the memory's speed, loads the model, runs every case and watches the device."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter, time
from typing import Any

import cpmrt
from cpmrt.bench.measure import Case, measure
from cpmrt.bench.monitor import Monitor
from cpmrt.bench.report import CaseReport, Report
from cpmrt.config import EngineConfig
from cpmrt.config.speculate_argument import LOOKUP
from cpmrt.cuda.bandwidth import pci_bus_id, read_bandwidth
from cpmrt.cuda.driver.device import Device, open_device
from cpmrt.dtypes import DType
from cpmrt.errors import ContextLengthError, CpmrtError, NoDeviceError
from cpmrt.llm import LLM
from cpmrt.reference.executor import ReferenceExecutor
from cpmrt.weights.quantised_specs import quantisation_facts

Listener = Callable[[CaseReport], None]
_STARTUP_LIMIT_S = 600
_STARTUP = """
import sys
sys.path = [sys.argv[1], *filter(None, sys.path)]  # the package is found, installed or not, and no file of the caller's
import json, time
from cpmrt import LLM, SamplingParams
with LLM(**json.loads(sys.argv[2])) as llm:
    llm.generate((1, 2, 3), SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True))
    print(time.time())
"""


def run_benchmark(
    name: str,
    settings: Mapping[str, Any],
    cases: Sequence[Case],
    *,
    repeats: int,
    temperature: float = 0.0,
    times_startup: bool = False,
    listener: Listener = lambda case: None,
) -> Report:
    """Measure `cases` of the model that `settings` (keyword arguments of `LLM`) describe; `name` is for the reader.

    `listener` is called with each case as it is done. `times_startup` also times a fresh process to its first token, at
    the end, when every kernel is compiled. Raises what `LLM` raises, and ContextLengthError before any case runs.
    """
    device = None if settings.get("executor") == "reference" else _device()
    bandwidth = read_bandwidth(device) / 1e9 if device else None
    with Monitor(pci_bus_id(device) if device else None) as monitor:
        started = perf_counter()
        with LLM(**settings) as llm:
            report = _report(name, settings, llm, perf_counter() - started, device, monitor)
            report.read_gb_per_s, report.samples, report.temperature = bandwidth, monitor.samples, temperature
            _check_cases(cases, llm.max_context)
            itemsize = (DType.FLOAT32 if report.executor == "reference" else DType.BFLOAT16).itemsize
            for case in cases:
                result = measure(
                    llm.executor, llm.config, case, repeats=repeats, itemsize=itemsize, tensors=llm.plan.tensors,
                    kv_bytes=llm.plan.kv_bytes_per_token,
                    adaptive=llm.engine.adaptive, simulated=report.simulated_accept is not None,
                    temperature=temperature,
                )  # fmt: skip
                report.cases.append(CaseReport.of(result, monitor.samples, bandwidth))
                listener(report.cases[-1])
    if times_startup:
        report.process_to_first_token_s = seconds_to_first_token(settings)
    return report


def _device() -> Device | None:
    """Return the GPU, or None if there is none: `LLM` raises the reason if it needs one."""
    try:
        return open_device()
    except NoDeviceError:
        return None


def _report(
    name: str, settings: Mapping[str, Any], llm: LLM, load_s: float, device: Device | None, monitor: Monitor
) -> Report:
    is_reference = isinstance(llm.executor, ReferenceExecutor)
    dtype = EngineConfig(dtype=settings.get("dtype", "auto")).storage_dtype(llm.config.dtype)
    if not is_reference and dtype is DType.FLOAT32:
        dtype = DType.BFLOAT16
    wishes = settings.get("speculate")
    return Report(
        model=name,
        executor="reference" if is_reference else "cuda",
        dtype=dtype.label,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        settings=dict(settings),
        device={**asdict(device), "nvidia_driver": monitor.driver_version} if device else {},
        load_s=load_s,
        plan_bytes=llm.plan.part_bytes,
        max_context=llm.max_context,
        quantization=quantisation_facts(llm.config.quantization, llm.plan.tensors),
        draft=(settings.get("draft") or LOOKUP) if llm.executor.limits.tree_shapes else None,
        simulated_accept=wishes.get("simulate_accept") if isinstance(wishes, Mapping) else None,
    )


def _check_cases(cases: Sequence[Case], max_context: int) -> None:
    for case in cases:
        num_tokens = case.prompt_tokens + case.new_tokens
        if num_tokens > max_context:
            fix = "shorten the case, or raise --max-context where model and memory allow it"
            raise ContextLengthError.of(f"case {case}", max_context, num_tokens, fix=fix)


def seconds_to_first_token(llm_arguments: Mapping[str, Any]) -> float:
    """Time a fresh process that starts Python, makes the `LLM` and generates one token.

    Raises CpmrtError with what the process said if it fails.
    """
    package = str(Path(cpmrt.__file__).parent.parent)
    command, started = [sys.executable, "-c", _STARTUP, package, json.dumps(dict(llm_arguments))], time()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_STARTUP_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise CpmrtError("a fresh process gave no token", actual=f"nothing in {_STARTUP_LIMIT_S} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CpmrtError("a fresh process gave no token", actual=said[-1])
    return float(done.stdout.split()[-1]) - started

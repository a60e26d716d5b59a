"""One benchmark from start to end: the memory's speed, the model's load, every case, the device watched meanwhile."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import Any

from cpmrt.bench.measure import Case, measure
from cpmrt.bench.monitor import Monitor
from cpmrt.bench.report import CaseReport, Report
from cpmrt.bench.shapes import draft_configs, shape_config
from cpmrt.bench.startup import seconds_to_first_token
from cpmrt.config import EngineConfig
from cpmrt.config.speculate_argument import LOOKUP
from cpmrt.cuda.bandwidth import pci_bus_id, read_bandwidth
from cpmrt.cuda.driver.device import Device, open_device
from cpmrt.dtypes import DType
from cpmrt.errors import ContextLengthError, NoDeviceError
from cpmrt.llm import LLM
from cpmrt.reference.executor import ReferenceExecutor
from cpmrt.weights.quantised_specs import quantisation_facts

Listener = Callable[[CaseReport], None]


@contextmanager
def shape_folder(shape: str, draft_changes: Mapping[str, Any] | None = None) -> Iterator[str]:
    """A folder with the config.json of a named shape, and in folders within it those of its drafts; nothing else.

    `draft_changes` are keys for the drafts' configs. Raises ConfigError.
    """
    with tempfile.TemporaryDirectory(prefix="cpmrt-shape-") as folder:
        Path(folder, "config.json").write_text(json.dumps(shape_config(shape)))
        for name, config in draft_configs(shape).items():
            Path(folder, name).mkdir()
            Path(folder, name, "config.json").write_text(json.dumps(config | dict(draft_changes or {})))
        yield folder


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

    `listener` is told each case as it is done. `times_startup` also times a fresh process to its first token, last, so
    that every kernel is compiled. Raises what `LLM` raises, and ContextLengthError before any case runs.
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
                    adaptive=llm.engine.adaptive, simulated=settings.get("simulate_accept") is not None,
                    temperature=temperature,
                )  # fmt: skip
                report.cases.append(CaseReport.of(result, monitor.samples, bandwidth))
                listener(report.cases[-1])
    if times_startup:
        report.process_to_first_token_s = seconds_to_first_token(settings)
    return report


def _device() -> Device | None:
    """The GPU if there is one; LLM says why not if it needs one."""
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
        simulated_accept=settings.get("simulate_accept"),
    )


def _check_cases(cases: Sequence[Case], max_context: int) -> None:
    for case in cases:
        if case.prompt_tokens + case.new_tokens > max_context:
            raise ContextLengthError(
                f"case {case} does not fit the context",
                expected=f"at most {max_context} tokens",
                actual=case.prompt_tokens + case.new_tokens,
                fix="raise max_context, or lower max_sequences",
            )

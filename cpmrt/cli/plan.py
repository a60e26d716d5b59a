"""Show the memory a model needs on a device, part by part, from its config.json alone: no GPU, no weights.

With --gpu-memory also the largest context that fits; the exit code is 1 if the plan does not fit.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from typing import Any

from cpmrt.cli.arguments import (
    add_engine_options,
    add_hf_overrides,
    add_model_source,
    memory_size,
)
from cpmrt.cli.output import printable, write, write_json
from cpmrt.config import EngineConfig
from cpmrt.cuda.workspace import cuda_needs
from cpmrt.dtypes import DType
from cpmrt.errors import UnsupportedModelError
from cpmrt.memory.kv_pages import PAGE_SIZE
from cpmrt.memory.plan import MemoryPlan, check_budget, format_bytes, largest_context
from cpmrt.models.planning import ExecutorNeeds, plan_model, position_limit
from cpmrt.weights.model_folder import ModelFolder

# The workspace of attention depends a little on the device: that of an H200, where it is largest.
_CAPABILITY, _NUM_SMS = 90, 132


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_model_source(parser, positional=True)
    parser.add_argument(
        "--context", type=int, metavar="TOKENS", help="of one sequence (default: the model's own, or what fits)"
    )
    parser.add_argument("--gpu-memory", type=memory_size, metavar="SIZE", help="what the plan must fit, such as 8GiB")
    add_engine_options(parser, "dtype", "max_sequences", "prefill_chunk")
    add_hf_overrides(parser)
    parser.add_argument("--json", action="store_true", help="write one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the plan. Raises MemoryPlanError, after it, if it does not fit."""
    settings = EngineConfig(
        dtype=args.dtype,
        max_context=args.context,
        memory_budget=args.gpu_memory,
        prefill_chunk=args.prefill_chunk,
        max_sequences=args.max_sequences,
    )
    folder = ModelFolder.open(args.model, revision=args.revision, weights=False, hf_overrides=args.hf_overrides)
    config, budget = folder.config, settings.memory_budget
    if config.quantization:
        raise UnsupportedModelError(
            f"{folder.path}: a plan would be wrong, the weights are quantised ({config.quantization})",
            fix="plan the 16-bit checkpoint of this model",
        )
    dtype = settings.storage_dtype(config.dtype)
    build = partial(_build, config, settings, dtype)
    limit = position_limit(config, settings)
    largest = None if budget is None else largest_context(build, budget, config.max_positions)
    context = limit if settings.max_context or largest is None else min(limit, largest or PAGE_SIZE)
    plan = build(context)
    if args.json:
        write_json(_record(str(folder.path), dtype, plan, budget, largest))
    else:
        write(_text(f"{folder.path}: {config.architecture}, {dtype.label}", plan, budget, largest))
    if budget is not None:
        check_budget(plan, budget)
    return 0


def _build(config: Any, settings: EngineConfig, dtype: DType, max_context: int) -> MemoryPlan:
    needs = ExecutorNeeds()
    if dtype is not DType.FLOAT32:  # which only the NumPy executor computes in
        needs = cuda_needs(config, settings, capability=_CAPABILITY, num_sms=_NUM_SMS)
    return plan_model(config, settings, itemsize=dtype.itemsize, max_context=max_context, needs=needs)


def _text(title: str, plan: MemoryPlan, budget: int | None, largest: int | None) -> str:
    lines = [printable(title), str(plan)]
    if budget is not None:
        shown = f"{largest} tokens" if largest else "none"
        lines.append(f"largest context that fits {format_bytes(budget)}: {shown}")
    return "\n".join(lines) + "\n"


def _record(model: str, dtype: DType, plan: MemoryPlan, budget: int | None, largest: int | None) -> dict[str, Any]:
    figures = asdict(plan)
    del figures["regions"]
    record = {"model": model, "dtype": dtype.label, "part_bytes": plan.part_bytes, **figures}
    if budget is not None:
        record |= {"budget_bytes": budget, "largest_context": largest, "fits": plan.total_bytes <= budget}
    return record

"""Show the memory a model needs on a device, part by part, from its config.json alone: no GPU, no weights.

MODEL is a folder or a hub id; --shape is a well-known shape instead. With --gpu-memory also whether it fits, what is
left, and the largest context that does; the exit code is 1 if the plan does not fit. Where weights are there, they say
which layers are quantised or ternary; else config.json does. The head copy is there if a start keeps one: without
--gpu-memory as if there were memory for everything.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from cpmrt.bench.shapes import SHAPES
from cpmrt.byte_sizes import format_bytes
from cpmrt.cli import arguments as options
from cpmrt.cli import option_values
from cpmrt.cli.described_model import add_description_options, described_model
from cpmrt.cli.output import printable, write, write_json
from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.cuda.assembly import CudaTarget
from cpmrt.cuda.precompile import known_device
from cpmrt.dtypes import DType
from cpmrt.errors import CpmrtError
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.memory.plan import MemoryPlan, check_budget, largest_context
from cpmrt.opening import Target
from cpmrt.reference.assembly import ReferenceTarget
from cpmrt.weights.quantised_specs import quantisation_facts, quantisation_summary

# The workspace depends a little on the device. Plans are for an H200, where it is largest.
_DEVICE = known_device("sm_90")


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_model_source(parser, positional=True)
    parser.add_argument("--shape", choices=SHAPES, help="a well-known shape, instead of MODEL")
    parser.add_argument(
        "--context", "--max-context", dest="max_context", type=option_values.token_count, metavar="TOKENS",
        help="of one sequence, such as 32768 or 32K (default: the model's own, or what fits)",
    )  # fmt: skip
    parser.add_argument(
        "--gpu-memory", "--memory-budget", dest="memory_budget", type=option_values.memory_size, metavar="SIZE",
        help="what the plan must fit, such as 8GiB",
    )  # fmt: skip
    options.add_engine_options(
        parser, "dtype", "max_sequences", "prefill_chunk", "lm_head_bits", "lm_head_screen", "kv_dtype",
    )  # fmt: skip
    add_description_options(parser)
    parser.add_argument("--json", action="store_true", help="write one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the plan. Raises MemoryPlanError afterwards if it does not fit --gpu-memory."""
    options.check_one_source(args, "plan")
    settings = options.engine_config(args)

    def target(config: ModelConfig) -> Target:
        # Only the NumPy executor computes in float32.
        is_reference = settings.storage_dtype(config.dtype) is DType.FLOAT32
        return ReferenceTarget() if is_reference else CudaTarget(_DEVICE)

    name, blueprint = described_model(args, settings, target, model=args.model, shape=args.shape)
    config, budget, dtype = blueprint.config, settings.memory_budget, blueprint.dtype
    limit = blueprint.position_limit
    largest = None if budget is None else largest_context(blueprint.plan, budget, config.max_positions)
    context = limit if settings.max_context or largest is None else min(limit, largest or PAGE_SIZE)
    plan = blueprint.screened_plan(context, budget) or blueprint.plan(context)
    if args.json:
        quantization = quantisation_summary(config.quantization, blueprint.specs)
        write_json(_record(name, dtype, plan, budget, largest) | {"quantization": quantization})
    else:
        kinds = [config.architecture, dtype.label, *quantisation_facts(config.quantization, blueprint.specs)]
        write(_text(f"{name}: {', '.join(kinds)}", plan, budget, largest))
    if budget is not None:
        check_budget(plan, budget, partial(_how_to_fit, args, settings, target, budget, largest))
    return 0


def _how_to_fit(
    args: argparse.Namespace,
    settings: EngineConfig,
    target: Callable[[ModelConfig], Target],
    budget: int,
    largest: int | None,
) -> str:
    """Return what to change on the command line so that the plan fits."""
    ways = [f"--context {largest} fits"] if largest else []
    if args.weight_bits is None:
        smaller = argparse.Namespace(**vars(args) | {"weight_bits": 4, "block_type": None})
        with suppress(CpmrtError):  # the rows of some matrices cannot be divided into groups
            _, blueprint = described_model(smaller, settings, target, model=args.model, shape=args.shape)
            context = largest_context(blueprint.plan, budget, blueprint.config.max_positions)
            ways += [f"--weight-bits 4 fits, with a context of up to {context} tokens"] if context else []
    return "; ".join(ways) or "choose a larger --gpu-memory, or a smaller model"


def _text(title: str, plan: MemoryPlan, budget: int | None, largest: int | None) -> str:
    lines = [printable(title), str(plan)]
    if budget is not None:
        left = budget - plan.total_bytes
        verdict = f"yes, {format_bytes(left)} left" if left >= 0 else f"no, {format_bytes(-left)} too much"
        lines.append(f"fits {format_bytes(budget)}: {verdict}")
        shown = f"{largest} tokens" if largest else "none"
        lines.append(f"largest context that fits {format_bytes(budget)}: {shown}")
    return "\n".join(lines) + "\n"


def _record(model: str, dtype: DType, plan: MemoryPlan, budget: int | None, largest: int | None) -> dict[str, Any]:
    names = ("total_bytes", "max_context", "max_sequences", "kv_bytes_per_token", "workspace_unshared_bytes")
    figures = {name: getattr(plan, name) for name in names}
    record = {"model": model, "dtype": dtype.label, "part_bytes": plan.part_bytes, **figures}
    if budget is not None:
        record |= {"budget_bytes": budget, "left_bytes": budget - plan.total_bytes}
        record |= {"largest_context": largest, "fits": plan.total_bytes <= budget}
    return record

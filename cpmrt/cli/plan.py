"""Show the memory a model needs on a device, part by part, from its config.json alone: no GPU, no weights.

MODEL is a folder or a hub id; --shape is a well-known shape instead. With --gpu-memory also whether it fits, what is
left, and the largest context that does; the exit code is 1 if the plan does not fit. Where the weights of a quantised
model are there, they say which layers are quantised; else its config.json does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from cpmrt.bench.run import shape_folder
from cpmrt.bench.shapes import SHAPES
from cpmrt.cli.arguments import (
    UsageError,
    add_draft_weight_bits,
    add_engine_options,
    add_hf_overrides,
    add_model_source,
    add_sparse,
    add_weight_bits,
    draft_changes,
    memory_size,
    overrides_with_weight_bits,
)
from cpmrt.cli.draft_options import add_draft_options, draft_arguments
from cpmrt.cli.output import printable, write, write_json
from cpmrt.config import EngineConfig
from cpmrt.config.speculate_argument import LOOKUP
from cpmrt.cuda.ahead_of_time import known_device
from cpmrt.cuda.draft_forward import executor_needs
from cpmrt.cuda.linear_plan import DeviceLimits
from cpmrt.dtypes import DType
from cpmrt.memory.kv_pages import PAGE_SIZE
from cpmrt.memory.plan import MemoryPlan, check_budget, format_bytes, largest_context
from cpmrt.models.draft import Draft
from cpmrt.models.draft_weights import open_draft
from cpmrt.models.planning import plan_model, position_limit, weight_specs
from cpmrt.reference.assembly import reference_needs
from cpmrt.tensor_spec import TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.draft_choice import with_speculation
from cpmrt.weights.draft_folder import resolve
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.quantised_specs import quantisation_facts, quantisation_summary

# Some of the workspace depends a little on the device: that of an H200, where it is largest.
_DEVICE = known_device("sm_90")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_model_source(parser, positional=True)
    parser.add_argument("--shape", choices=SHAPES, help="a well-known shape, instead of MODEL")
    parser.add_argument(
        "--context", type=int, metavar="TOKENS", help="of one sequence (default: the model's own, or what fits)"
    )
    parser.add_argument("--gpu-memory", type=memory_size, metavar="SIZE", help="what the plan must fit, such as 8GiB")
    add_weight_bits(parser)
    add_draft_weight_bits(parser)
    add_engine_options(parser, "dtype", "max_sequences", "prefill_chunk", "lm_head_bits")
    add_hf_overrides(parser)
    add_sparse(parser)
    add_draft_options(parser)
    parser.add_argument("--json", action="store_true", help="write one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the plan. Raises MemoryPlanError, after it, if it does not fit."""
    if args.shape and args.model:
        raise UsageError("MODEL and --shape exclude each other; see cpmrt plan --help")
    settings = EngineConfig(
        dtype=args.dtype,
        max_context=args.context,
        memory_budget=args.gpu_memory,
        prefill_chunk=args.prefill_chunk,
        max_sequences=args.max_sequences,
        lm_head_bits=args.lm_head_bits,
    )
    changes = draft_changes(args)
    with ExitStack() as stack:
        model = stack.enter_context(shape_folder(args.shape, changes)) if args.shape else args.model
        overrides = overrides_with_weight_bits(args)
        folder = ModelFolder.open(
            model, revision=args.revision, weights=False, hf_overrides=overrides, sparse=args.sparse
        )  # fmt: skip
        specs = _specs(folder, settings, from_weights=args.weight_bits is None)
        draft = _draft(folder, settings, specs, **draft_arguments(args))
    config, budget = folder.config, settings.memory_budget
    dtype = settings.storage_dtype(config.dtype)
    build = partial(_build, config, settings, dtype, specs, draft)
    limit = position_limit(config, settings)
    largest = None if budget is None else largest_context(build, budget, config.max_positions)
    context = limit if settings.max_context or largest is None else min(limit, largest or PAGE_SIZE)
    plan = build(context)
    name = args.shape or str(folder.path)
    if args.json:
        quantization = quantisation_summary(config.quantization, specs)
        write_json(_record(name, dtype, plan, budget, largest) | {"quantization": quantization})
    else:
        kinds = [config.architecture, dtype.label, *quantisation_facts(config.quantization, specs)]
        write(_text(f"{name}: {', '.join(kinds)}", plan, budget, largest))
    if budget is not None:
        check_budget(plan, budget)
    return 0


def _specs(folder: ModelFolder, settings: EngineConfig, *, from_weights: bool) -> tuple[TensorSpec, ...]:
    """The weights as they will be held; a quantised checkpoint that is here tells more than its config.json."""
    if from_weights and folder.config.quantization and any(folder.path.glob("*.safetensors")):
        with Checkpoint.open(folder.path) as checkpoint:
            return weight_specs(folder.config, settings, checkpoint)
    return weight_specs(folder.config, settings)


def _draft(
    folder: ModelFolder, settings: EngineConfig, specs: Sequence[TensorSpec], draft: str | None, speculate: Any
) -> Draft | None:
    """What is attached to the model: as its tensors say where they are there, else by its config.json."""
    is_model = draft not in (None, LOOKUP) and speculate != "off"
    if is_model and not any(resolve(str(draft), folder.path, weights=False).glob("*.safetensors")):
        settings = replace(settings, load_format="dummy")
    with open_draft(folder, with_speculation(settings, folder, draft, speculate), specs) as (_, found):
        return found


def _build(
    config: Any,
    settings: EngineConfig,
    dtype: DType,
    specs: Sequence[TensorSpec],
    draft: Draft | None,
    max_context: int,
) -> MemoryPlan:
    if dtype is DType.FLOAT32:  # which only the NumPy executor computes in
        needs = reference_needs(draft, settings.max_sequences)
    else:
        capability, limits = _DEVICE.capability, DeviceLimits.of(_DEVICE)
        needs = executor_needs(config, settings, specs, draft, capability=capability, limits=limits)
    return plan_model(
        config, settings, itemsize=dtype.itemsize, max_context=max_context, needs=needs, specs=specs, draft=draft
    )


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
    figures = asdict(plan)
    del figures["regions"], figures["tensors"]
    record = {"model": model, "dtype": dtype.label, "part_bytes": plan.part_bytes, **figures}
    if budget is not None:
        record |= {"budget_bytes": budget, "left_bytes": budget - plan.total_bytes}
        record |= {"largest_context": largest, "fits": plan.total_bytes <= budget}
    return record

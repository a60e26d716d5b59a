"""Finds the modules that a start of a model compiles, without the device: `cpmrt compile` builds them ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.cuda.build.launcher import Launcher, Module
from cpmrt.cuda.build.modules import Modules
from cpmrt.cuda.draft.block import block_modules, candidate_vocab
from cpmrt.cuda.draft.forward import draft_forward, every_inner_shape, every_shape
from cpmrt.cuda.draft.kernels import tree_modules
from cpmrt.cuda.draft.memory import as_target
from cpmrt.cuda.draft.several import late_rows, most_sequences
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.kernels import KERNELS, files
from cpmrt.cuda.load.repack import repack_modules
from cpmrt.cuda.ops.gemm import GEMM, Gemm, trial_tile
from cpmrt.cuda.ops.linear_packed.products import held_weights
from cpmrt.cuda.step.forward import StepForward
from cpmrt.cuda.step.kernels import step_modules
from cpmrt.cuda.step.memory import buckets, certain_rows, row_counts
from cpmrt.errors import ConfigError
from cpmrt.executor import MAX_ROWS
from cpmrt.memory.plan import MemoryPlan
from cpmrt.models.draft import PREFIX, Draft
from cpmrt.opening import Blueprint

_SHARED_SMALL, _SHARED_AMPERE, _SHARED_HOPPER = 101_376, 166_912, 232_448
# Architecture -> name, multiprocessors, bytes of shared memory a block can have. CUDA C++ Programming Guide, "Compute
# Capabilities", and the data sheets of the boards.
_KNOWN_DEVICES = {
    "sm_80": ("A100", 108, _SHARED_AMPERE),
    "sm_86": ("RTX 3090", 82, _SHARED_SMALL),
    "sm_87": ("Jetson AGX Orin", 16, _SHARED_AMPERE),
    "sm_89": ("RTX 4090", 128, _SHARED_SMALL),
    "sm_90": ("H100 and H200", 132, _SHARED_HOPPER),
    "sm_100": ("B200", 148, _SHARED_HOPPER),
    "sm_103": ("B300", 160, _SHARED_HOPPER),
    "sm_110": ("Jetson AGX Thor", 20, _SHARED_HOPPER),
    "sm_120": ("RTX 5090", 170, _SHARED_SMALL),
    "sm_121": ("DGX Spark", 48, _SHARED_SMALL),
}
# How many clusters of eight blocks, a block to a multiprocessor, ran at once on the H200 that was measured. On a device
# with another number a start compiles the modules that differ.
_KNOWN_CLUSTERS = {"sm_90": 15}


def known_device(arch: str, num_sms: int | None = None) -> Device:
    """Return a description of a device of this architecture, such as "sm_87", to find a model's modules with.

    They depend on the number of multiprocessors: `num_sms`, else that of the best known device. Fields on which no
    module depends are 0. Raises ConfigError for an unknown architecture.
    """
    if arch not in _KNOWN_DEVICES:
        raise ConfigError("unknown architecture", expected=" | ".join(_KNOWN_DEVICES), actual=arch)
    name, best_known, shared_bytes = _KNOWN_DEVICES[arch]
    return Device(
        index=0,
        name=name,
        arch=arch,
        capability=int(arch.removeprefix("sm_")),
        num_sms=num_sms or best_known,
        shared_bytes_per_block=shared_bytes,
        total_bytes=0,
        is_unified=False,
        driver_version=(0, 0),
        whole_clusters=_KNOWN_CLUSTERS.get(arch, 0),
        has_wide_clusters=arch == "sm_90",
    )


def modules_of(blueprint: Blueprint, device: Device) -> list[Module]:
    """Return every module of a start on this device: the executor's own recording, on arrays without memory.

    This includes modules for starts without cuBLASLt, or with weights that are converted or random. Where a start
    decides by its memory whether to screen the head, it includes the modules for either: a forward that can screen the
    head reads the whole one too. Raises UnsupportedModelError, ConfigError.
    """
    settings, draft, limit = blueprint.settings, blueprint.draft, blueprint.position_limit
    plan = blueprint.screened_plan(limit) or blueprint.plan(limit)
    config = blueprint.config.for_context(plan.max_context)
    for checked in (config, None if draft is None else draft.config.decoder):
        if checked is not None:
            blueprint.target.check(checked, settings)
    word = np.zeros((), np.uint16)
    arrays: dict[str, Any] = {region.name: np.broadcast_to(word, region.shape) for region in plan.regions}
    arrays |= held_weights(plan.tensors, arrays, device)
    launcher = Launcher(None, Modules(device.arch, blueprint.dtype), use_pdl=False)
    gemm = Gemm(device, launcher, arrays["gemm_workspace"], use_library=False)
    with launcher.recording() as modules:
        _record(config, settings, device, launcher, gemm, arrays, plan, draft)
        launcher(GEMM, trial_tile(device), 1, 1)
    sized = {spec.file for spec in KERNELS if spec.macros}
    without_sizes: list[Module] = [(file, {}) for file in files(device.arch) if file not in sized]
    repacking = [module for module in repack_modules(plan.tensors, device) if module not in modules]
    found = [*modules, *repacking, *step_modules(config, device)]
    if draft is not None:
        for one in filter(None, (draft, draft.inner)):
            found += (*tree_modules(config, device, candidate_vocab(one)), *block_modules(one))
    return [*found, *(module for module in without_sizes if module not in found)]


def _record(
    config: ModelConfig,
    settings: EngineConfig,
    device: Device,
    launcher: Launcher,
    gemm: Gemm,
    arrays: Mapping[str, Any],
    plan: MemoryPlan,
    draft: Draft | None,
) -> None:
    """Run every forward of a start, and those that later requests may need, on a recording launcher."""
    taps, chunks = draft.config.taps if draft else (), buckets(settings.prefill_chunk)
    forward = StepForward(config, device, launcher, gemm, arrays, plan.caches, taps)
    forward.every_shape(chunks, row_counts(settings.max_sequences))
    for count in row_counts(certain_rows(config, settings, plan.caches)):  # once an answer has a form
        forward.decode(count)
    rows = len(arrays["x"])
    for count in filter(None, {MAX_ROWS, rows % MAX_ROWS}):  # once a prompt's logits are asked for
        forward.head(arrays["logits"][:count], arrays["x"][:count])
    if draft is not None:
        own = draft_forward(draft, plan.draft_caches, device, launcher, gemm, arrays)
        every_shape(draft, forward, own, chunks, most_sequences(draft, plan.caches))
        if own is not None:
            own.waiting(late_rows(draft))  # once an answer has a form
        if draft.inner is not None and own is not None:
            caches = plan.inner_caches and replace(plan.inner_caches, prefix=PREFIX)
            inner = draft_forward(draft.inner, caches, device, launcher, gemm, as_target(arrays))
            every_inner_shape(draft, own, inner, chunks)

"""Converts a symmetric 4-bit GPTQ checkpoint (group size 128 or -1) to CPM.cu's Marlin layout, and back.

Codes and scales only change places: converting there and back gives the same bits. Marlin as CPM.cu writes it has one
file, model_gptq.safetensors; q, k, v and gate, up fused along the outputs; qweight and scales in the order of
tensor-core fragments, without qzeros and g_idx; and the config.json of the GPTQ checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cpmrt.config import WeightQuantization
from cpmrt.dtypes import Array
from cpmrt.errors import UnsupportedModelError
from cpmrt.models.decoder import tensor_specs
from cpmrt.quantization.file_writer import SafetensorsWriter, TensorPlan
from cpmrt.quantization.formats import planned_tensors, words_of
from cpmrt.quantization.grid import MIDDLE, QuantisedLinear
from cpmrt.quantization.outputs import copy_companions, copy_file, new_folder
from cpmrt.tensor_spec import Source, TensorSpec
from cpmrt.weights.check import check
from cpmrt.weights.checkpoint import SINGLE_NAME, Checkpoint
from cpmrt.weights.files import is_there
from cpmrt.weights.formats import format_of
from cpmrt.weights.formats.marlin import MARLIN, fused_module
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.quantised import read_codes, read_zeros
from cpmrt.weights.quantised_specs import quantised_specs

MARLIN_FILE = "model_gptq.safetensors"
_MARLIN_GROUP_SIZES = (128, -1)


@dataclass(frozen=True)
class Linear:
    """A quantised matrix: the sources that hold its rows, and its rows in each module of the new checkpoint."""

    sources: Sequence[Source]
    modules: dict[str, slice]


def convert(folder: ModelFolder, target: Path, *, back: bool) -> None:
    """Convert a GPTQ checkpoint to Marlin, or with `back` one of Marlin to GPTQ, into the new folder `target`.

    Raises ConfigError, CheckpointError, UnsupportedModelError.
    """
    settings = _settings(folder)
    gptq = "gptq" if settings.v1_zeros else "gptq_v2"
    new, file_name = (gptq, SINGLE_NAME) if back else ("marlin", MARLIN_FILE)
    with Checkpoint.open(folder.path) as checkpoint, new_folder(target) as partial:
        copy_companions(folder.path, partial)
        for name in ("config.json", "quantize_config.json"):
            if is_there(folder.path / name):
                copy_file(folder.path / name, partial / name)
        linears, unchanged = _parts(folder, settings, checkpoint, back=back)
        kept = {name: checkpoint.entries[name] for name in unchanged}
        plans = {name: TensorPlan(entry.dtype, entry.shape) for name, entry in kept.items()}
        for linear in linears:
            plans |= _plan(linear, checkpoint, new)
        with SafetensorsWriter(partial / file_name, plans) as writer:
            for name in kept:
                writer.write(name, checkpoint.view(name))
            for linear in linears:
                for name, words in _tensors(linear, checkpoint, new):
                    writer.write(name, words)


def _parts(
    folder: ModelFolder, settings: WeightQuantization, checkpoint: Checkpoint, *, back: bool
) -> tuple[list[Linear], list[str]]:
    """Return the matrices to convert, and the names of the tensors that stay as they are."""
    plain = tensor_specs(folder.config)
    stored = quantised_specs(plain, settings, checkpoint)
    check(stored, checkpoint)
    linears, unchanged = list[Linear](), list[str]()
    for spec, packed in zip(plain, stored, strict=True):
        if spec.product not in (None, "head"):
            _check_packing(folder.path, packed, "marlin" if back else "gptq")
            linears.append(Linear(packed.sources, _modules(spec, packed, fused=not back)))
        else:
            unchanged += [source.name for source in packed.sources]
    return linears, unchanged


def _modules(spec: TensorSpec, packed: TensorSpec, *, fused: bool) -> dict[str, slice]:
    """Return the modules of a matrix in the new checkpoint with their rows: one each, or one `fused` module for all."""
    if not fused:
        return {source.name.removesuffix(".weight"): rows for source, rows in spec.parts()}
    module = packed.sources[0].name
    return {fused_module(module, spec.product) or module: slice(0, spec.shape[0])}


def _plan(linear: Linear, checkpoint: Checkpoint, name: str) -> dict[str, TensorPlan]:
    """Return the plans of a matrix's tensors in the new format, by name."""
    first = linear.sources[0]
    scales, num_columns = checkpoint.entries[format_of(first).scales.of(first.name)], first.shape[1]
    assert first.packing is not None
    num_groups, plans = num_columns // first.packing.group_size, dict[str, TensorPlan]()
    for module, rows in linear.modules.items():
        tensors = planned_tensors(name, rows.stop - rows.start, num_columns, num_groups, scales.dtype)
        plans |= {f"{module}.{suffix}": plan for suffix, plan in tensors.items()}
    return plans


def _tensors(linear: Linear, checkpoint: Checkpoint, name: str) -> Iterator[tuple[str, Array]]:
    """Yield the name and content of each tensor of `_plan`. Raises CheckpointError where zero points are not 8."""
    parts = []
    for source in linear.sources:
        read_zeros(source, checkpoint)
        scales = format_of(source).scales
        stored = scales.unpack(checkpoint.view(scales.of(source.name)))
        parts.append((read_codes(source, checkpoint, 0, source.shape[0]), stored))
    codes, all_scales = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    num_columns, num_groups = codes.shape[1], all_scales.shape[1]
    group = np.arange(num_columns, dtype=np.int32) // (num_columns // num_groups)
    whole = QuantisedLinear(codes, all_scales, np.full(all_scales.shape, MIDDLE, np.uint8), group)
    for module, rows in linear.modules.items():
        for suffix, words in words_of(name, whole.rows(rows.start, rows.stop)).items():
            yield f"{module}.{suffix}", words


def _settings(folder: ModelFolder) -> WeightQuantization:
    """Return the checkpoint's quantisation settings.

    Raises UnsupportedModelError where CPM.cu's Marlin layout cannot express them or has no place for the model's biases
    and norms.
    """
    settings, config = folder.config.quantization, folder.config
    where = f"{folder.path}: quantization_config"
    if settings is None or settings.lm_head or settings.packing != "gptq":
        found = "none" if settings is None else f"{settings.method}, lm_head {settings.lm_head}"
        fix = "make it with cpmrt quantize, or name a FILE.gguf" if settings is None else None
        raise UnsupportedModelError(where, expected="4 bits of gptq, the head in 16", actual=found, fix=fix)
    if not settings.symmetric or settings.act_order or settings.group_size not in _MARLIN_GROUP_SIZES:
        raise UnsupportedModelError(
            f"{where} cannot be said in CPM.cu's Marlin layout",
            expected=f"sym true, desc_act false, group_size {' or '.join(map(str, _MARLIN_GROUP_SIZES))}",
            actual=f"sym {settings.symmetric}, desc_act {settings.act_order}, group_size {settings.group_size}",
            fix="quantise again, with --static-groups if --act-order is wanted",
        )
    if config.attention.qkv_bias or config.attention.output_bias or config.attention.qk_norm:
        raise UnsupportedModelError(
            f"{folder.path}: CPM.cu's Marlin models have no biases and no norms on heads", actual=config.architecture
        )
    return settings


def _check_packing(folder: Path, packed: TensorSpec, found: str) -> None:
    for source in packed.sources:
        stored = "16 bits" if source.packing is None else source.packing.format
        is_permuted = source.packing is not None and source.packing.permuted
        if stored != found or is_permuted:
            raise UnsupportedModelError(
                f"{folder}: {source.name}",
                expected=f"4 bits as in {found}, groups of neighbouring columns",
                actual=stored + (", columns in an order of their own" if is_permuted else ""),
            )
    num_rows, num_columns = packed.shape
    if num_rows % MARLIN.row_step or num_columns % MARLIN.column_step:
        raise UnsupportedModelError(
            f"{folder}: {packed.name}",
            expected=f"outputs in multiples of {MARLIN.row_step}, inputs of {MARLIN.column_step}",
            actual=list(packed.shape),
        )

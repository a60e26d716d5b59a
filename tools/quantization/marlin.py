"""Between symmetric GPTQ checkpoints and CPM.cu's Marlin layout: the same codes and scales in another order.

Marlin as CPM.cu writes it has one file, model_gptq.safetensors; q, k, v and gate, up fused along the outputs; qweight
and scales in the order of tensor-core fragments, without qzeros and g_idx; and config.json of the GPTQ checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from cpmrt.config import WeightQuantization
from cpmrt.dtypes import Array
from cpmrt.errors import UnsupportedModelError
from cpmrt.models.decoder import tensor_specs
from cpmrt.tensor_spec import Source, TensorSpec
from cpmrt.weights.check import check
from cpmrt.weights.checkpoint import SINGLE_NAME, Checkpoint
from cpmrt.weights.formats import GPTQ, MARLIN
from cpmrt.weights.formats.format import U8
from cpmrt.weights.formats.gptq import pack_zeros, to_v1
from cpmrt.weights.formats.marlin import FUSED_MODULES
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.quantised import read_codes, read_zeros
from cpmrt.weights.quantised_specs import quantised_specs
from quantization.checkpoint_writer import copy_companions, new_folder
from quantization.file_writer import SafetensorsWriter, TensorPlan
from quantization.grid import MIDDLE

MARLIN_FILE = "model_gptq.safetensors"
GROUP_SIZES = (128, -1)

Tensor = tuple[str, TensorPlan, Callable[[], Array]]
"""A tensor to be written: its name, what it is, and its words when they are wanted."""


def gptq_to_marlin(source: Path, target: Path) -> None:
    """Make the folder `target`. Raises ConfigError, CheckpointError, UnsupportedModelError."""
    _convert(source, target, "gptq", MARLIN_FILE, _as_marlin)


def marlin_to_gptq(source: Path, target: Path) -> None:
    """The inverse, bit for bit; g_idx and qzeros say what has been implied. Raises as `gptq_to_marlin`."""
    _convert(source, target, "marlin", SINGLE_NAME, _as_gptq)


Layout = Callable[[TensorSpec, TensorSpec, Checkpoint, WeightQuantization], Iterator[Tensor]]


def _convert(source: Path, target: Path, found: str, file_name: str, layout: Layout) -> None:
    folder = ModelFolder.open(source)
    settings = _settings(folder)
    plain = tensor_specs(folder.config)
    with Checkpoint.open(folder.path) as checkpoint, new_folder(target) as partial:
        stored = quantised_specs(plain, settings, checkpoint)
        check(stored, checkpoint)
        tensors: list[Tensor] = []
        for spec, packed in zip(plain, stored, strict=True):
            if _is_linear(spec):
                _check_packing(folder.path, packed, found)
                tensors.extend(layout(spec, packed, checkpoint, settings))
            else:
                tensors.extend(_unchanged(packed.sources, checkpoint))
        with SafetensorsWriter(partial / file_name, {name: plan for name, plan, _ in tensors}) as writer:
            for name, _, words in tensors:
                writer.write(name, words())
        copy_companions(folder.path, partial)
        for name in ("config.json", "quantize_config.json"):
            if (folder.path / name).exists():
                shutil.copyfile(folder.path / name, partial / name)


def _settings(folder: ModelFolder) -> WeightQuantization:
    """What the checkpoint's config says, if Marlin can say it too."""
    settings, config = folder.config.quantization, folder.config
    where = f"{folder.path}: quantization_config"
    if settings is None or settings.lm_head or settings.packing != "gptq":
        found = "none" if settings is None else f"{settings.method}, lm_head {settings.lm_head}"
        raise UnsupportedModelError(where, expected="4 bits of gptq, the head in 16", actual=found)
    if not settings.symmetric or settings.act_order or settings.group_size not in GROUP_SIZES:
        raise UnsupportedModelError(
            f"{where} cannot be said in CPM.cu's Marlin layout",
            expected=f"sym true, desc_act false, group_size {' or '.join(map(str, GROUP_SIZES))}",
            actual=f"sym {settings.symmetric}, desc_act {settings.act_order}, group_size {settings.group_size}",
            fix="quantise again, with --static-groups if --act-order is wanted",
        )
    if config.qkv_bias or config.output_bias or config.qk_norm:
        raise UnsupportedModelError(
            f"{folder.path}: CPM.cu's Marlin models have no biases and no norms on heads", actual=config.architecture
        )
    return settings


def _is_linear(spec: TensorSpec) -> bool:
    return len(spec.shape) == 2 and spec.name.startswith("layers.")


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


def _unchanged(sources: Sequence[Source], checkpoint: Checkpoint) -> Iterator[Tensor]:
    for source in sources:
        plan = TensorPlan(checkpoint.entries[source.name].dtype, source.shape)
        yield source.name, plan, lambda name=source.name: checkpoint.view(name)  # type: ignore[misc]


def _as_marlin(
    spec: TensorSpec, packed: TensorSpec, checkpoint: Checkpoint, settings: WeightQuantization
) -> Iterator[Tensor]:
    """qweight and scales of a spec's GPTQ sources, one below the other."""
    module = packed.sources[0].name
    fused = FUSED_MODULES.get(spec.name.rpartition(".")[2])
    if fused is not None:
        module = f"{module.rpartition('.')[0]}.{fused}"
    (num_rows, num_columns), names = spec.shape, [f"{source.name}.scales" for source in packed.sources]
    entry = checkpoint.entries[names[0]]

    def codes() -> Array:
        for source in packed.sources:
            read_zeros(source, checkpoint)
        return MARLIN.codes.pack(np.concatenate([_codes(source, checkpoint) for source in packed.sources]))

    def scales() -> Array:
        return MARLIN.scales.pack(np.concatenate([checkpoint.view(name).T for name in names]))

    yield f"{module}.qweight", TensorPlan("I32", (num_columns // MARLIN.column_step, 2 * num_rows)), codes
    yield f"{module}.scales", TensorPlan(entry.dtype, (entry.shape[0], num_rows)), scales


def _as_gptq(
    spec: TensorSpec, packed: TensorSpec, checkpoint: Checkpoint, settings: WeightQuantization
) -> Iterator[Tensor]:
    """All four tensors of each of a spec's own sources."""
    (stored,) = packed.sources
    entry, begin = checkpoint.entries[f"{stored.name}.scales"], 0
    num_groups = entry.shape[0]
    for source in spec.sources:
        module, (num_rows, num_columns) = source.name.removesuffix(".weight"), source.shape
        rows = slice(begin, begin + num_rows)
        begin = rows.stop

        def codes(rows: slice = rows) -> Array:
            return GPTQ.codes.pack(_codes(stored, checkpoint)[rows])

        def scales(rows: slice = rows) -> Array:
            every: Array = MARLIN.scales.unpack(checkpoint.view(f"{stored.name}.scales"))
            return np.ascontiguousarray(every[rows].T)

        def zeros(num_rows: int = num_rows) -> Array:
            words = pack_zeros(np.full((num_rows, num_groups), MIDDLE, np.uint8))
            return to_v1(words) if settings.v1_zeros else words

        def group_of(num_columns: int = num_columns) -> Array:
            return np.repeat(np.arange(num_groups, dtype=np.int32), num_columns // num_groups)

        yield f"{module}.qweight", TensorPlan("I32", (num_columns // 8, num_rows)), codes
        yield f"{module}.scales", TensorPlan(entry.dtype, (num_groups, num_rows)), scales
        yield f"{module}.qzeros", TensorPlan("I32", (num_groups, num_rows // 8)), zeros
        yield f"{module}.g_idx", TensorPlan("I32", (num_columns,)), group_of


def _codes(source: Source, checkpoint: Checkpoint) -> U8:
    """u of a whole matrix."""
    return read_codes(source, checkpoint, 0, source.shape[0])

"""Finds which weights of a model are quantised and how, from the tensors of its checkpoint or from settings alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cpmrt.config import WeightQuantization
from cpmrt.config.quantization import GGUF, TERNARY
from cpmrt.errors import CheckpointError, ConfigError, UnsupportedModelError, quoted
from cpmrt.tensor_spec import Packing, Quantization, Source, TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.formats import FORMATS, codes_of, detect, stored_tensors
from cpmrt.weights.formats.format import I32, Entries, Format, Shape
from cpmrt.weights.formats.gptq import GPTQ_HEAD, HEAD
from cpmrt.weights.formats.marlin import fused_module
from cpmrt.weights.gguf.specs import declared_blocks, gguf_specs
from cpmrt.weights.quantised import read_order
from cpmrt.weights.ternary import TERNARY_BITS, declared_ternary

_GROUPS = (128, 64, 32)
_ROW_LAYERS = ("qkv", "residual", "gate_up")
BLOCKS = "GGUF"
"""The method in `quantisation_summary` of weights in blocks of GGUF."""


def quantised_specs(
    specs: Sequence[TensorSpec], settings: WeightQuantization | None, checkpoint: Checkpoint | None
) -> tuple[TensorSpec, ...]:
    """Return the `specs` of a model in 16 bits as its checkpoint holds them.

    The checkpoint's tensors decide. Without a checkpoint `settings` alone do, which is right except for layers that
    differ by rules. For a GGUF file `settings` do not count. Sources that cannot share one quantised weight (other
    group sizes, another order of columns, some in 16 bits) are to be dequantised: their spec has packed sources and no
    `quant`. Raises CheckpointError where tensors and settings contradict each other, UnsupportedModelError for sizes
    that do not divide.
    """
    if checkpoint is not None and checkpoint.is_gguf:
        return gguf_specs(specs, checkpoint)
    if settings is None:
        return tuple(specs)
    if settings.method == GGUF and checkpoint is None:
        return declared_blocks(specs, settings.packing)
    if settings.method == TERNARY:
        return tuple(declared_ternary(spec, settings) for spec in specs)
    made = tuple(_quantised(spec, settings, checkpoint) for spec in specs)
    if checkpoint is not None and not any(source.packing for spec in made for source in spec.sources):
        raise CheckpointError(
            f"{checkpoint.folder}: quantization_config says {settings.method}, and no tensor is quantised",
            fix="check that config.json (or quantize_config.json) belongs to these weights",
        )
    return made


def quantise_head(specs: Sequence[TensorSpec], bits: int | None) -> tuple[TensorSpec, ...]:
    """Return `specs` with the output head held in `bits` bits (None: as it is).

    A head that is tied to the embedding becomes a weight of its own. Raises ConfigError where the head is quantised
    already, or no group size divides its columns.
    """
    if bits is None:
        return tuple(specs)
    by_name = {spec.name: spec for spec in specs}
    head = by_name.get("lm_head") or replace(by_name["embed_tokens"], name="lm_head", product="head", part="lm head")
    if any(source.packing for source in head.sources):
        raise ConfigError("lm_head_bits", expected="nothing: the head is quantised in the checkpoint", actual=bits)
    group_size = _divisor(head)
    if group_size is None:
        raise ConfigError("lm_head_bits", expected="nothing: hidden_size is not a multiple of 32", actual=bits)
    quantised = replace(head, quant=Quantization(bits, group_size))
    return (*(spec for spec in specs if spec.name != "lm_head"), quantised)


def round_layers(specs: Sequence[TensorSpec], bits: int | None) -> tuple[TensorSpec, ...]:
    """Return the `specs` of a draft with the matrices of its layers rounded to `bits` bits (None: as they are).

    Raises ConfigError where one is quantised already, or no group size divides its columns.
    """
    if bits is None:
        return tuple(specs)
    return tuple(_rounded(spec, bits) if spec.product in _ROW_LAYERS else spec for spec in specs)


def _rounded(spec: TensorSpec, bits: int) -> TensorSpec:
    if any(source.packing for source in spec.sources):
        what = "nothing: the draft's layers are quantised in its checkpoint"
        raise ConfigError("speculate: layer_bits", expected=what, actual=bits)
    group_size = _divisor(spec)
    if group_size is None:
        what = f"nothing: {spec.name} has {spec.shape[1]} columns, no multiple of 32"
        raise ConfigError("speculate: layer_bits", expected=what, actual=bits)
    return replace(spec, quant=Quantization(bits, group_size))


def _divisor(spec: TensorSpec) -> int | None:
    """Return the largest group size that divides the columns of a matrix to be rounded from 16 bits, or None."""
    return next((size for size in _GROUPS if spec.shape[1] % size == 0), None)


def quantisation_summary(settings: WeightQuantization | None, specs: Sequence[TensorSpec]) -> dict[str, Any] | None:
    """Return what is quantised and how, as a dict to print; None where nothing is quantised.

    `bits` and `group_size` list the different numbers of all layers. `in_16_bits`: matrices that the checkpoint holds
    in 16 bits; `dequantised`: quantised ones that are converted to 16 bits while they are loaded.
    """
    matrices = [spec for spec in specs if spec.product is not None]
    held = {spec.name: spec.quant for spec in matrices if spec.quant is not None}
    packed = [spec for spec in matrices if any(source.packing for source in spec.sources)]
    if not held and not packed:
        return None
    layers = [quant for name, quant in held.items() if name != "lm_head"]
    quants = layers or list(held.values())
    formats = {source.packing.format for spec in packed for source in spec.sources if source.packing is not None}
    is_named = packed and settings is not None and settings.method != GGUF
    return {
        "method": settings.method if settings and is_named else _made_by(packed, layers),
        "tensors": " and ".join(sorted(formats)) or "in 16 bits",
        "bits": sorted({quant.bits for quant in quants} or {4}),
        "group_size": sorted({quant.group_size for quant in quants}),
        "symmetric": all(quant.symmetric for quant in quants),
        "act_order": any(source.packing.permuted for spec in packed for source in spec.sources if source.packing),
        "lm_head_bits": held["lm_head"].bits if "lm_head" in held else 16,
        "in_16_bits": [spec.name for spec in matrices if spec.quant is None and spec not in packed],
        "dequantised": [spec.name for spec in packed if spec.quant is None],
    }


def quantisation_facts(settings: WeightQuantization | None, specs: Sequence[TensorSpec]) -> list[str]:
    """Return short phrases that say what is quantised and how; none where nothing is."""
    summary = quantisation_summary(settings, specs)
    if summary is None:
        return []
    if summary["method"] == BLOCKS:
        count = len(summary["dequantised"])
        return [f"GGUF blocks {summary['tensors']}", *[f"{count} matrices held in 16 bits"] * bool(count)]
    # Marlin files carry the settings of what they were made from.
    name = summary["tensors" if summary["tensors"] == "marlin" else "method"]
    bits, sizes = (" and ".join(map(str, summary[key])) for key in ("bits", "group_size"))
    facts = [f"{name} {bits} bits", f"groups of {sizes}"]
    facts += ["zero points"] * (not summary["symmetric"]) + ["act-order"] * summary["act_order"]
    facts.append(f"head in {summary['lm_head_bits']} bits")
    layers = [name for name in summary["in_16_bits"] + summary["dequantised"] if name != "lm_head"]
    return facts + [f"{len(layers)} matrices of layers in 16 bits"] * bool(layers)


def _made_by(packed: Sequence[TensorSpec], layers: Sequence[Quantization]) -> str:
    """Return the method of weights that no settings describe: GGUF blocks, ternary, or rounded while loading."""
    if packed:
        return BLOCKS
    return TERNARY if any(quant.bits == TERNARY_BITS for quant in layers) else "round to nearest"


def _quantised(spec: TensorSpec, settings: WeightQuantization, checkpoint: Checkpoint | None) -> TensorSpec:
    if spec.product is None:
        return spec
    if checkpoint is None:
        sources = tuple(_predicted(source, settings) for source in spec.sources)
    else:
        sources = tuple(_found(source, settings, checkpoint) for source in _stored_sources(spec, checkpoint))
    if spec.product == "per_head":
        return replace(spec, sources=sources)
    return replace(spec, sources=sources, quant=_shared(sources, checkpoint))


def _predicted(source: Source, settings: WeightQuantization) -> Source:
    """Return a source as the settings alone describe it."""
    module = source.name.removesuffix(".weight")
    if not settings.covers(module):
        return source
    size = settings.group_of(source.shape[1])
    packing = Packing(settings.packing, size, settings.symmetric, settings.act_order, settings.v1_zeros)
    if module == HEAD and settings.wide_head_group:
        size = source.shape[1] if settings.wide_head_group == -1 else settings.wide_head_group
        packing = Packing(GPTQ_HEAD.name, size, symmetric=True, v1_zeros=settings.v1_zeros)
    return _packed(module, source.shape, packing)


def _stored_sources(spec: TensorSpec, checkpoint: Checkpoint) -> tuple[Source, ...]:
    """Return the sources of a spec, or the one fused source where the checkpoint stores them so (`fused_module`)."""
    fused = fused_module(spec.sources[0].name.removesuffix(".weight"), spec.product)
    if fused and codes_of(fused, checkpoint.entries):
        return (Source(f"{fused}.weight", spec.shape),)
    return spec.sources


def _found(source: Source, settings: WeightQuantization, checkpoint: Checkpoint) -> Source:
    """Return a source as the checkpoint holds it."""
    module, entries = source.name.removesuffix(".weight"), checkpoint.entries
    codes = codes_of(module, entries)
    if codes is None:
        return source
    if source.name in entries:
        raise CheckpointError(
            f"{checkpoint.folder}: {quoted(module)} is there twice",
            expected="a weight in 16 bits, or a quantised one",
            actual=f"{quoted(source.name)} and {quoted(codes)}",
        )
    row = detect(module, source.shape, settings.packing, entries)
    if codes != row.codes.of(module):
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {quoted(codes)} contradicts quantization_config",
            expected=f"{quoted(row.codes.of(module))} of {settings.method}",
            fix="check that config.json belongs to these weights",
        )
    if row.zeros is None and not settings.symmetric:
        raise CheckpointError(
            f"{checkpoint.folder}: {quoted(module)} has no zero points", expected="sym true in quantization_config"
        )
    has_zeros = row.zeros_if_symmetric or (row.zeros is not None and row.zeros.of(module) in entries)
    # A head in 8 bits is symmetric whatever the layers are; `read_zeros` checks it.
    size, symmetric = _group_size(source, row, settings, entries), settings.symmetric or not has_zeros or row.bits == 8
    packing = Packing(row.name, size, symmetric, v1_zeros=settings.v1_zeros)
    found = _packed(module, source.shape, packing)
    return replace(found, packing=replace(packing, permuted=_order(found, checkpoint) is not None))


def _packed(module: str, shape: Shape, packing: Packing) -> Source:
    """Make a quantised source. Raises UnsupportedModelError where its sizes do not divide."""
    row = FORMATS[packing.format]
    for kind, size, step, label in (
        ("rows", shape[0], row.row_step, row.row_step),
        ("columns", shape[1], row.column_step, row.column_step),
        ("columns", shape[1], packing.group_size, f"group_size ({packing.group_size})"),
    ):
        if size % step:
            what = f"{quoted(module)}: {kind} of a quantised weight"
            raise UnsupportedModelError(what, expected=f"a multiple of {label}", actual=size)
    return Source(module, shape, packing)


def _group_size(source: Source, row: Format, settings: WeightQuantization, entries: Entries) -> int:
    """Return the columns of a group from the settings or, where layers differ by rules, from the shape of the scales.
    """
    num_rows, num_columns = source.shape
    size = settings.group_of(num_columns)
    scales = entries.get(row.scales.of(source.name.removesuffix(".weight")))
    if settings.overrides and scales is not None:
        for other in (size, 32, 64, 128, num_columns):
            if scales.shape == row.scales.shape(num_rows, num_columns, num_columns // other):
                return other
    return size


def _order(source: Source, checkpoint: Checkpoint) -> I32 | None:
    """Return the order of a source's columns (`read_order`), None if a tensor has a fault: `check` reports that."""
    for tensor in stored_tensors(source):
        entry = checkpoint.entries.get(tensor.name)
        if entry is not None and tensor.fault(entry):
            return None
    return read_order(source, checkpoint)


def _shared(sources: Sequence[Source], checkpoint: Checkpoint | None) -> Quantization | None:
    """Return how one quantised weight can hold all of `sources`; None where they differ too much for that."""
    packings = [source.packing for source in sources if source.packing is not None]
    if len(packings) < len(sources) or len({(p.group_size, p.permuted) for p in packings}) > 1:
        return None
    first = packings[0]
    if first.permuted and checkpoint is not None:
        orders = [order for source in sources if (order := _order(source, checkpoint)) is not None]
        if not all(np.array_equal(order, orders[0]) for order in orders):
            return None
    bits = FORMATS[first.format].bits
    if bits == 8 and first.permuted:
        raise UnsupportedModelError(
            f"{quoted(sources[0].name)}: an output head in 8 bits", expected="its columns in order", actual="act-order"
        )
    return Quantization(bits, first.group_size, all(p.symmetric for p in packings), first.permuted)

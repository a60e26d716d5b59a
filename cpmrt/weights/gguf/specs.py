"""Says how the weights of a model lie in a GGUF file: in blocks of which type, and in which order of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from cpmrt.tensor_spec import Packing, Quantization, Source, TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.formats.blocks import BLOCK_TYPES


def gguf_specs(specs: Sequence[TensorSpec], checkpoint: Checkpoint) -> tuple[TensorSpec, ...]:
    """Return the `specs` of a model in 16 bits as its GGUF file holds them, tensor by tensor.

    A matrix all of whose sources are in blocks keeps them, each with its own type; an embedding becomes one in 16 bits,
    and a head that is tied to it keeps its blocks, as a weight of its own. What is not as it must be `check` tells.
    """
    made = [_as_stored(spec, checkpoint) for spec in specs]
    by_name = {spec.name: spec for spec in made}
    embedding = by_name.get("embed_tokens")
    if embedding is not None and "lm_head" not in by_name and embedding.sources[0].packing is not None:
        head = replace(embedding, name="lm_head", product="head", part="lm head")
        made.append(replace(head, quant=_held(head)))
    return tuple(made)


def without_blocks(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the `specs` with 16 bits for whatever is held in blocks; a tied head is its embedding again."""
    embeddings = [spec.sources for spec in specs if spec.name.endswith("embed_tokens")]
    return tuple(
        replace(spec, quant=None) if spec.quant is not None and spec.quant.in_blocks else spec
        for spec in specs
        if spec.product != "head" or spec.sources not in embeddings
    )


def _as_stored(spec: TensorSpec, checkpoint: Checkpoint) -> TensorSpec:
    found = replace(spec, sources=tuple(_stored(source, checkpoint) for source in spec.sources))
    return replace(found, quant=_held(found))


def _stored(source: Source, checkpoint: Checkpoint) -> Source:
    entry, head_dim = checkpoint.entries.get(source.name), checkpoint.pairs.get(source.name)
    if entry is None or entry.shape != source.shape:
        return source
    if head_dim and source.shape[0] % head_dim == 0:
        source = replace(source, rows=unpaired(source.shape[0], head_dim))
    if entry.dtype not in BLOCK_TYPES:
        return source
    kind = BLOCK_TYPES[entry.dtype]
    row_bytes = kind.row_bytes(source.shape[1])
    return replace(source, packing=Packing(kind.name, kind.group, kind.is_symmetric, row_bytes=row_bytes))


def unpaired(num_rows: int, head_dim: int) -> tuple[int, ...]:
    """Return where the rows of heads are that lie in pairs: row j of a head at 2 j, row j + head_dim / 2 at 2 j + 1."""
    halves = (range(head + second, head + head_dim, 2) for head in range(0, num_rows, head_dim) for second in (0, 1))
    return tuple(chain.from_iterable(halves))


def _held(spec: TensorSpec) -> Quantization | None:
    """Return how an executor can hold the blocks of a spec; None for what is no matrix, or one that every product takes
    in 16 bits, or is not all in blocks."""
    packings = [source.packing for source in spec.sources if source.packing is not None]
    if spec.product in (None, "per_head") or len(packings) < len(spec.sources):
        return None
    bits = max(BLOCK_TYPES[packing.format].bits for packing in packings)
    group_size = min(packing.group_size for packing in packings)
    return Quantization(bits, group_size, all(packing.symmetric for packing in packings), in_blocks=True)

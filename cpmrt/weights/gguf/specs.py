"""Describes how a GGUF file holds the weights of a model: in blocks of which type, and in which order of rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain

from cpmrt.errors import ConfigError, quoted
from cpmrt.tensor_spec import Packing, Quantization, Source, TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.formats.blocks import BLOCK_TYPES, BlockType

Q4_K_M = "Q4_K_M"
DECLARED = (*BLOCK_TYPES, Q4_K_M)
"""The block types that random weights may have, and llama.cpp's mixture of two."""


def gguf_specs(specs: Sequence[TensorSpec], checkpoint: Checkpoint) -> tuple[TensorSpec, ...]:
    """Return the `specs` of a model in 16 bits as its GGUF file holds them, tensor by tensor.

    A matrix all of whose sources are in blocks is held in these blocks, each source with its own type, and so is an
    embedding. A head that is tied to such an embedding becomes a weight of its own, with the same blocks. The source of
    a tensor that is absent or has another shape, and that of a vector in blocks, stays as it is: `weights.check`
    refuses it.
    """
    made = [_as_stored(spec, checkpoint) for spec in specs]
    by_name = {spec.name: spec for spec in made}
    embedding = by_name.get("embed_tokens")
    if embedding is not None and "lm_head" not in by_name and embedding.sources[0].packing is not None:
        head = replace(embedding, name="lm_head", product="head", part="lm head")
        made.append(replace(head, quant=_held(head)))
    return tuple(made)


def without_blocks(specs: Sequence[TensorSpec], names: Collection[str]) -> tuple[TensorSpec, ...]:
    """Return `specs` with the weights `names`, which are in blocks, held in 16 bits instead.

    A head of these names that has the sources of its embedding is dropped: it is tied to the embedding again.
    """
    embeddings = [spec.sources for spec in specs if spec.name.endswith("embed_tokens")]
    return tuple(
        replace(spec, quant=None) if spec.name in names else spec
        for spec in specs
        if spec.product != "head" or spec.name not in names or spec.sources not in embeddings
    )


def declared_blocks(specs: Sequence[TensorSpec], name: str) -> tuple[TensorSpec, ...]:
    """Return `specs` with matrices in blocks of the type `name`, or of llama.cpp's mixture Q4_K_M, for random weights.

    Raises ConfigError for an unknown type, and for columns that make no whole blocks.
    """
    if name not in DECLARED:
        raise ConfigError("type of GGUF blocks", expected=" | ".join(DECLARED), actual=quoted(name))
    depth = 1 + max((_layer_of(spec) for spec in specs), default=0)
    made = []
    for spec in specs:
        if spec.product not in (None, "per_head") and not spec.num_experts:
            sources = (_declared(source, _type_of(name, source, _layer_of(spec), depth)) for source in spec.sources)
            spec = replace(spec, sources=tuple(sources))
        made.append(replace(spec, quant=_held(spec)))
    return tuple(made)


def _layer_of(spec: TensorSpec) -> int:
    """Return the number of the layer that a weight belongs to, or -1."""
    first, _, rest = spec.name.partition(".")
    return int(rest.partition(".")[0]) if first == "layers" else -1


def _type_of(name: str, source: Source, layer: int, depth: int) -> str:
    """Return the block type of a matrix: in Q4_K_M the head and, in half of the layers, v and down have 6 bits."""
    if name != Q4_K_M:
        return name
    is_kept = layer < depth // 8 or layer >= 7 * depth // 8 or (layer - depth // 8) % 3 == 2
    is_wide = layer < 0 or (is_kept and any(part in source.name for part in ("v_proj", "down_proj")))
    return "Q6_K" if is_wide else "Q4_K"


def _declared(source: Source, name: str) -> Source:
    kind = BLOCK_TYPES[name]
    if source.shape[1] % kind.size:
        raise ConfigError(f"{source.name}: columns", expected=f"a multiple of {kind.size}", actual=source.shape[1])
    return replace(source, packing=_packing(kind, source.shape[1]))


def _packing(kind: BlockType, num_columns: int) -> Packing:
    return Packing(kind.name, kind.group, kind.is_symmetric, row_bytes=kind.row_bytes(num_columns))


def _as_stored(spec: TensorSpec, checkpoint: Checkpoint) -> TensorSpec:
    found = replace(spec, sources=tuple(_stored(source, checkpoint) for source in spec.sources))
    return replace(found, quant=_held(found))


def _stored(source: Source, checkpoint: Checkpoint) -> Source:
    entry, head_dim = checkpoint.entries.get(source.name), checkpoint.pairs.get(source.name)
    if entry is None or entry.shape != source.shape:
        return source
    if head_dim and source.shape[0] % head_dim == 0:
        source = replace(source, rows=unpaired(source.shape[0], head_dim))
    if entry.dtype not in BLOCK_TYPES or len(source.shape) == 1:
        return source
    return replace(source, packing=_packing(BLOCK_TYPES[entry.dtype], source.shape[1]))


def unpaired(num_rows: int, head_dim: int) -> tuple[int, ...]:
    """Return the places in the file of a matrix's rows, in the model's order, where the rows of heads lie in pairs.

    In each head's rows in the file, row j of the head is at 2 j and row j + head_dim / 2 at 2 j + 1.
    """
    halves = (range(head + second, head + head_dim, 2) for head in range(0, num_rows, head_dim) for second in (0, 1))
    return tuple(chain.from_iterable(halves))


def _held(spec: TensorSpec) -> Quantization | None:
    """Return how an executor can hold the blocks of a spec.

    None for a weight that is neither a matrix of a product nor an embedding, for `per_head` matrices, which their
    products take in 16 bits, and for a weight whose sources are not all in blocks.
    """
    packings = [source.packing for source in spec.sources if source.packing is not None]
    is_held = spec.product not in (None, "per_head") or spec.name == "embed_tokens"
    if not is_held or len(packings) < len(spec.sources):
        return None
    bits = max(BLOCK_TYPES[packing.format].factor_bits for packing in packings)
    group_size = min(packing.group_size for packing in packings)
    return Quantization(bits, group_size, all(packing.symmetric for packing in packings), in_blocks=True)

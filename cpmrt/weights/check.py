"""Compares a checkpoint with what the model needs; one message names every missing, unexpected and wrong tensor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from cpmrt.errors import CheckpointError, UnsupportedModelError, listed, quoted
from cpmrt.tensor_spec import Source, TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.copies import EMBEDDING, HEAD, is_copy
from cpmrt.weights.formats import stored_tensors
from cpmrt.weights.mapped_file import TensorEntry
from cpmrt.weights.quantised import check_shape_tensor
from cpmrt.weights.safetensors import FLOATS

LEFTOVERS = ("*.rotary_emb.*", HEAD)
"""Patterns of tensors that may be present and unused.

RoPE tables (`model.layers.0.self_attn.rotary_emb.inv_freq`) were saved by old transformers; here they are
computed. `lm_head.weight` is a leftover only where no spec asks for it: the head is then tied to the embedding, and
the tensor is a copy of it.
"""

DRAFT_LEFTOVERS = (
    *LEFTOVERS, "*embed_tokens.weight", "norm.weight", "model.norm.weight", "t2d", "d2t", "token_id_remap",
)  # fmt: skip
"""Patterns of unused tensors of an EAGLE draft, which uses the target's embedding, and mostly its norm and head."""

_QUANTISED = (
    ("*.weight_packed", "compressed-tensors"),
    ("*.g_idx", "GPTQ"),
    ("*.qzeros", "GPTQ or AWQ"),
    ("*.qweight", "GPTQ, AWQ or Marlin"),
    ("*.scales", "GPTQ, AWQ or Marlin"),
    ("*.quant_state.*", "bitsandbytes"),
    ("*.absmax", "bitsandbytes"),
    ("*.SCB", "bitsandbytes"),
    ("*.weight_scale_inv", "block FP8"),
    ("*.weight_scale", "FP8 or compressed-tensors"),
    ("*.codebooks", "AQLM"),
)
"""Tensor names that betray a quantisation, the most telling first."""


def check(specs: Sequence[TensorSpec], checkpoint: Checkpoint, *, ignore: Sequence[str] = LEFTOVERS) -> None:
    """Compare the sources of all `specs` with the tensors of `checkpoint`.

    Missing and unexpected tensors, wrong shapes and wrong types are listed together in one CheckpointError.
    A tensor that fits a pattern of `ignore` may be there unused. Raises UnsupportedModelError where the
    unexpected tensors are those of a quantised format. A head that is not used must be a copy of the embedding.
    """
    sources = {source.name: source for spec in specs for source in spec.sources}
    wanted = {tensor.name: tensor for source in sources.values() for tensor in stored_tensors(source)}
    unexpected = _unexpected(wanted.keys(), checkpoint, ignore)
    if any(source.packing for source in sources.values()):
        unexpected = [name for name in unexpected if not _is_empty_bias(name, checkpoint)]
    else:
        _refuse_quantised(unexpected, checkpoint)
    found = checkpoint.entries
    wrong = [
        f"{quoted(name)} {fault}"
        for name, tensor in wanted.items()
        if name in found and (fault := tensor.fault(found[name]))
    ]
    required = [name for name, tensor in wanted.items() if tensor.required]
    faults = (
        ("missing", [quoted(name) for name in required if name not in found]),
        ("unexpected", [quoted(name) for name in unexpected]),
        ("wrong", wrong),
    )
    if any(some for _, some in faults):
        raise CheckpointError(
            f"{checkpoint.folder}: the tensors are not those that config.json promises",
            expected=f"{len(required)} tensors",
            actual="; ".join(f"{len(some)} {kind}: {listed(some)}" for kind, some in faults if some),
            fix="check that config.json belongs to these weights",
        )
    if HEAD not in wanted and EMBEDDING in wanted:
        _refuse_own_head(checkpoint)
    for source in sources.values():
        if source.packing is not None and not source.packing.row_bytes:
            check_shape_tensor(source, checkpoint)


def source_entry(source: Source, checkpoint: Checkpoint) -> TensorEntry:
    """Return the tensor of a source that is not quantised. Raises CheckpointError if it is absent, or if its shape or
    type is another.
    """
    entry = checkpoint.entries.get(source.name)
    if entry is None:
        raise CheckpointError(f"{checkpoint.folder} has no tensor {quoted(source.name)}")
    shape = source.shape if source.rows is None else (*entry.shape[:1], *source.shape[1:])
    if entry.shape != shape or entry.dtype not in FLOATS:
        raise CheckpointError(
            f"{entry.path}: tensor {quoted(source.name)}",
            expected=f"{' | '.join(FLOATS)} {list(shape)}",
            actual=f"{entry.dtype} {quoted(list(entry.shape))}",
        )
    return entry


def _unexpected(wanted: Collection[str], checkpoint: Checkpoint, ignore: Sequence[str]) -> list[str]:
    return [name for name in checkpoint.entries if name not in wanted and not _is_any(name, ignore)]


def _refuse_quantised(names: Sequence[str], checkpoint: Checkpoint) -> None:
    """Raise UnsupportedModelError where one of these unexpected tensors is of a quantised format."""
    label = next((label for pattern, label in _QUANTISED if any(fnmatchcase(name, pattern) for name in names)), None)
    if label is not None:
        raise UnsupportedModelError(
            f"{checkpoint.folder}: the weights are quantised ({label}), and config.json does not say how",
            expected=f"plain {' | '.join(FLOATS)} tensors, or a quantization_config",
            actual=listed([quoted(name) for name in names], limit=3),
            fix="download config.json again, or use the unquantised checkpoint of this model",
        )


def _refuse_own_head(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError where config.json ties the head to the embedding and the checkpoint has another head."""
    if not is_copy(checkpoint, checkpoint, HEAD, EMBEDDING):
        raise CheckpointError(
            f"{checkpoint.folder}: config.json ties the output head to the embedding",
            actual=f"another matrix as {quoted(HEAD)}",
            fix='set "tie_word_embeddings": false in config.json (or in hf_overrides), or remove that tensor',
        )  # fmt: skip


def _is_empty_bias(name: str, checkpoint: Checkpoint) -> bool:
    """Whether the tensor is a bias of zeros, which old GPTQ tools gave to layers that have none."""
    return name.endswith(".bias") and checkpoint.entries[name].dtype in FLOATS and not checkpoint.view(name).any()


def _is_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)

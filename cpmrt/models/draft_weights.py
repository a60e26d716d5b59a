"""Opens the draft that the settings ask for, compares it with its target, and decides how its weights are held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from cpmrt import env
from cpmrt.config import EngineConfig, SpeculationConfig
from cpmrt.config.draft import DraftConfig
from cpmrt.config.dspark import chains_of
from cpmrt.errors import CheckpointError, ConfigError, UnsupportedModelError, quoted
from cpmrt.models.draft import PREFIX, Draft, prefixed, tensor_specs
from cpmrt.models.drafts.dspark import cut_markov
from cpmrt.models.layers import Names
from cpmrt.tensor_spec import TensorSpec
from cpmrt.weights.check import DRAFT_LEFTOVERS, LEFTOVERS, check
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.copies import EMBEDDING, HEAD, is_copy
from cpmrt.weights.draft_folder import DraftFolder
from cpmrt.weights.files import is_there
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.quantised_specs import quantise_head, quantised_specs, round_layers
from cpmrt.weights.repository import has_weights
from cpmrt.weights.token_index import checked_token_ids, find_token_index, read_token_index

_REMAP, _OFFSETS = "token_id_remap", "d2t"


@contextmanager
def open_draft(
    folder: ModelFolder, engine: EngineConfig, specs: Sequence[TensorSpec]
) -> Iterator[tuple[tuple[Checkpoint | None, ...], Draft]]:
    """Yield the checkpoints of the draft and of its inner draft, and the draft. The settings must ask for speculation.

    A checkpoint is None for a draft without files or with random weights.

    `specs`: the target's weights (`planning.weight_specs`). Raises CheckpointError, ConfigError,
    UnsupportedModelError.
    """
    wish = engine.speculation
    assert wish is not None, "opened without speculation"
    if wish.method == "lookup" or engine.draft is None:
        yield (None,), Draft(DraftConfig.lookup(), wish.shapes, forced_accept=wish.forced_accept)
        return
    is_dummy = engine.load_format == "dummy"
    own = DraftFolder.open(engine.draft, folder, wish, weights=not is_dummy)
    with ExitStack() as stack:
        checkpoint = None if is_dummy else stack.enter_context(Checkpoint.open(own.path))
        own_specs = _own_specs(own.config, checkpoint, wish)
        draft = _draft(own, own_specs, checkpoint, folder, wish, specs)
        if wish.inner is None:
            yield (checkpoint,), draft
            return
        small = ModelFolder.open(own.path, weights=not is_dummy)
        inside = replace(engine, draft=wish.inner.draft, speculation=wish.inner.speculation)
        checkpoints, inner = stack.enter_context(open_draft(small, inside, own_specs))
        yield (checkpoint, *checkpoints), replace(draft, inner=_within(inner))


def _within(inner: Draft) -> Draft:
    """Return the draft as an inner one: its weights' names get one more prefix."""
    head = None if inner.head is None else prefixed((inner.head,))[0]
    return replace(inner, specs=prefixed(inner.specs), head=head)


def _own_specs(config: DraftConfig, checkpoint: Checkpoint | None, wish: SpeculationConfig) -> tuple[TensorSpec, ...]:
    """Return the weights of the draft's checkpoint as they are to be held, without the prefix."""
    specs = quantised_specs(tensor_specs(config), config.layers_config.quantization, checkpoint)
    specs = round_layers(specs, wish.layer_bits)
    if not config.uses_targets_head:
        specs = quantise_head(specs, config.head_bits)
    if checkpoint is not None:
        check(specs, checkpoint, ignore=DRAFT_LEFTOVERS if config.reads_states else LEFTOVERS)
    return specs


def _draft(
    folder: DraftFolder,
    own_specs: tuple[TensorSpec, ...],
    checkpoint: Checkpoint | None,
    target: ModelFolder,
    wish: SpeculationConfig,
    target_specs: Sequence[TensorSpec],
) -> Draft:
    config, vocab_size = folder.config, target.config.vocab_size
    token_map, head, shapes = None, None, wish.shapes
    if config.method == "eagle3":
        token_map = _from_offsets(config, checkpoint, vocab_size)
    elif config.uses_targets_head:
        token_map = _frequent(folder.path, checkpoint, vocab_size, wish)
    if config.block is not None:
        shapes, own_specs = chains_of(wish.shapes, config.block), cut_markov(own_specs, token_map)
    specs = prefixed(own_specs)
    if config.uses_targets_head:
        if own := _own_head(config, checkpoint, target):
            specs += (_copied_head((own,), config.head_bits, token_map) or prefixed((own,))[0],)
        else:
            head = _copied_head(target_specs, config.head_bits, token_map)
    draft = Draft(
        config, shapes, specs, head, token_map, wish.forced_accept, wish.min_confidence or 0.0
    )  # fmt: skip
    if (top_k := max(shape.top_k for shape in shapes)) > draft.vocab_size:
        raise ConfigError("speculate: top_k", expected=f"at most the draft's {draft.vocab_size} tokens", actual=top_k)
    return draft


def _from_offsets(config: DraftConfig, checkpoint: Checkpoint | None, vocab_size: int) -> tuple[int, ...] | None:
    """Return the token map by EAGLE-3's tensor `d2t`, which has what to add to each of the draft's ids.

    Without the tensor the first ids of the target; None: both have the same vocabulary.
    """
    if checkpoint is None or _OFFSETS not in checkpoint.entries:
        return None if config.draft_vocab == vocab_size else tuple(range(config.draft_vocab))
    offsets = _integers(checkpoint, _OFFSETS)
    ids = (np.arange(len(offsets)) + offsets).tolist()
    return checked_token_ids(ids, vocab_size, f"{checkpoint.folder}: tensor {_OFFSETS}")


def _frequent(
    folder: Path, checkpoint: Checkpoint | None, vocab_size: int, wish: SpeculationConfig
) -> tuple[int, ...] | None:
    """Return the tokens that the target's head is cut to, by the user's wish, else by a list that the draft brings.

    None: the head is not cut.
    """
    wanted = wish.draft_vocab
    if isinstance(wanted, str):
        path = Path(env.expanded(wanted))
        if not is_there(path):
            expected = "a number of tokens such as 8192, or a file that lists them"
            raise ConfigError("speculate: draft_vocab", expected=expected, actual=quoted(wanted))
        return read_token_index(path, vocab_size)
    if wanted == vocab_size:
        return None
    if wanted is not None and wanted > vocab_size:
        raise ConfigError("speculate: draft_vocab", expected=f"at most {vocab_size}, the vocabulary", actual=wanted)
    if checkpoint is not None and _REMAP in checkpoint.entries:
        ids: tuple[int, ...] | None = checked_token_ids(
            _integers(checkpoint, _REMAP).tolist(), vocab_size, f"{checkpoint.folder}: tensor {_REMAP}"
        )
    else:
        file = find_token_index(folder, wanted)
        ids = read_token_index(file, vocab_size) if file else None
    if wanted is None:
        return ids
    if ids is None and checkpoint is None:  # random weights: any tokens do
        ids = tuple(range(wanted))
    if ids is None or len(ids) < wanted:
        raise ConfigError(
            f"{folder}: speculate: draft_vocab {wanted} needs a list of frequent tokens",
            expected=f"freq_{wanted}.pt, freq_{wanted}.json or a longer list in the draft's folder",
            actual="none" if ids is None else f"{len(ids)} tokens",
            fix="make one with tools/gen_fr_index.py, or leave draft_vocab out",
        )
    return ids[:wanted]


def _integers(checkpoint: Checkpoint, name: str) -> np.ndarray:
    entry = checkpoint.entries[name]
    if entry.dtype not in ("I32", "I64") or len(entry.shape) != 1:
        raise CheckpointError(
            f"{entry.path}: tensor {name}", expected="a row of I32 or I64", actual=f"{entry.dtype} {list(entry.shape)}"
        )
    return checkpoint.view(name).astype(np.int64)


def _own_head(config: DraftConfig, checkpoint: Checkpoint | None, target: ModelFolder) -> TensorSpec | None:
    """Return the head that a draft brings along, or None if it has none or one that equals the target's.

    Where the target's weights are not here, the head is taken for a copy of the target's, so that a plan needs no
    weights. Raises UnsupportedModelError for a draft with another embedding than the target's.
    """
    if checkpoint is None or not config.has_head or not has_weights(target.path):
        return None
    embedding = EMBEDDING if config.block is None else EMBEDDING.removeprefix("model.")
    with Checkpoint.open(target.path) as theirs:
        if not is_copy(checkpoint, theirs, embedding, EMBEDDING):
            raise UnsupportedModelError(
                f"{checkpoint.folder}: the draft has an embedding of its own", expected="that of its target",
                fix="use a draft that was made for this model",
            )  # fmt: skip
        if is_copy(checkpoint, theirs, HEAD, HEAD if HEAD in theirs.entries else EMBEDDING):
            return None
    decoder = config.layers_config
    return Names("", "").weight("lm_head", HEAD, decoder.vocab_size, decoder.hidden_size, product="head")


def _copied_head(specs: Sequence[TensorSpec], bits: int | None, token_map: tuple[int, ...] | None) -> TensorSpec | None:
    """Return a draft's head made of the head among `specs`: its rows `token_map` (None: all), in `bits` bits (None: as
    it is held). None: it would be the same as that head."""
    by_name = {spec.name: spec for spec in specs}
    held = by_name.get("lm_head") or by_name["embed_tokens"]
    is_same = bits is None or (held.quant is not None and held.quant.bits == bits)
    if token_map is None and is_same:
        return None
    (source,) = held.sources
    if source.packing is not None and not (source.packing.row_bytes and is_same):
        raise ConfigError(
            "speculate: the target's head is quantised in its checkpoint, so the draft's can be no other",
            expected="neither draft_vocab nor head_bits",
            fix="set draft_vocab to the size of the vocabulary",
        )
    if not is_same:
        held = quantise_head((replace(held, name="lm_head", quant=None),), bits)[-1]
    rows = token_map and (len(token_map), held.shape[1])
    shape, source = rows or held.shape, replace(source, shape=rows or source.shape, rows=token_map)
    return replace(
        held, name=f"{PREFIX}lm_head", shape=shape, sources=(source,), product="head", part="draft", mapped_as=None
    )

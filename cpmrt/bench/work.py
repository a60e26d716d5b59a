"""The least number of operations and bytes that a step needs, to compare measured times with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.config.layers import ExpertsMlp, GroupedAttention, LatentAttention, LightningAttention, MixerConfig
from cpmrt.errors import UnsupportedModelError
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.models.decoder import cache_layout, tensor_specs
from cpmrt.models.draft import PREFIX
from cpmrt.models.planning import weight_specs
from cpmrt.tensor_spec import SCREEN, TensorSpec

_STATE_BYTES = 4
"""The bytes of an element of a recurrent state, which is float32 everywhere."""


def decode_bytes(
    config: ModelConfig,
    context: int,
    rows: int,
    itemsize: int,
    tensors: Iterable[TensorSpec] | None = None,
    kv_bytes: int | None = None,
    mean_rescored: float | None = None,
) -> int:
    """Return the bytes that a decode step of `rows` sequences reads: every weight, each sequence's keys and values, and
    each state twice, since it is written too.

    With sparse attention a step reads the keys and values of the chosen blocks, and every compressed key. The embedding
    table counts only where it is also the head; its few rows and all activations are left out. As many experts count as
    `rows` rows can choose. `tensors` are the weights as they are held (None: as config.json says); those of a draft do
    not count. `kv_bytes` are the bytes of a token's keys and values (None: `itemsize` an element). A screened head
    counts with its copy, a bound for each row and `mean_rescored` rows of its own (None: the whole head is read).
    """
    specs = tensors or weight_specs(config, EngineConfig())
    held = [spec for spec in specs if not spec.name.startswith(PREFIX)]
    sizes = {spec.name: _taken(config, spec, spec.num_bytes(itemsize), rows) for spec in held}
    head = "lm_head" if "lm_head" in sizes else "embed_tokens"
    if mean_rescored is not None:
        copy = next(replace(spec, quant=SCREEN) for spec in held if spec.name == head)
        num_rows, num_columns = copy.shape
        sizes[head] = copy.num_bytes(itemsize) + 4 * num_rows + round(mean_rescored * num_columns * itemsize)
    if head == "lm_head":
        del sizes["embed_tokens"]
    layout, seen = cache_layout(config, 1, 1), _seen_tokens(config, context)
    per_token = layout.bytes_per_token(1)
    read = seen * (kv_bytes or per_token * itemsize)
    if seen < context:
        read += (context // 16 + context // 64) * per_token // 2 * itemsize
    states = (shape for spec, shape in layout.arrays() if spec.scope == "slot")
    read += sum(2 * prod(shape) * _STATE_BYTES for shape in states)
    return sum(sizes.values()) + rows * read


def _taken(config: ModelConfig, spec: TensorSpec, size: int, rows: int) -> int:
    """Return the part of a weight's `size` that `rows` rows use: of stacked experts, as many as they can choose."""
    mlp = config.mlp
    if not spec.num_experts or not isinstance(mlp, ExpertsMlp):
        return size
    return size * min(rows * mlp.experts_per_token, mlp.num_experts) // mlp.num_experts


def _seen_tokens(config: ModelConfig, num_tokens: int) -> int:
    """Return how many of `num_tokens` tokens the last of them looks at."""
    sparse = config.sparse
    if sparse is None or not sparse.leaves_out(num_tokens):
        return num_tokens
    return sparse.num_selected * PAGE_SIZE - -num_tokens % PAGE_SIZE


def prefill_flops(config: ModelConfig, num_tokens: int) -> int:
    """Return the floating-point operations of a prompt, with the output head for its last token only."""
    attended = sum(_score_size(layer.mixer) for layer in config.layers) * _attention_flops(config, num_tokens)
    states = (mixer for layer in config.layers if isinstance(mixer := layer.mixer, LightningAttention))
    attended += num_tokens * sum(4 * mixer.width * mixer.head_dim for mixer in states)
    return 2 * num_tokens * _taken_elements(config) + attended + 2 * config.hidden_size * config.vocab_size


def _taken_elements(config: ModelConfig) -> int:
    """Return the elements of the layers' matrices that a token is multiplied by: of experts only those it chooses."""
    matrices = (spec for spec in tensor_specs(config) if spec.part == "layers" and len(spec.shape) > 1)
    return sum(_taken(config, spec, spec.num_elements, 1) for spec in matrices)


def _score_size(mixer: MixerConfig) -> int:
    """Return the mean width of a token's queries and its attention values, over all heads.

    A pair of tokens costs 4 operations for each element. 0 for lightning attention, which attends to no pairs.
    """
    if isinstance(mixer, GroupedAttention):
        return mixer.q_size
    if isinstance(mixer, LightningAttention):
        return 0
    if isinstance(mixer, LatentAttention):
        return (mixer.q_size + mixer.value_size) // 2
    kinds = "grouped, latent and lightning attention"
    fix = "add a formula to cpmrt/bench/work.py"
    raise UnsupportedModelError("the work of a prompt", expected=kinds, actual=type(mixer).__name__, fix=fix)


def _attention_flops(config: ModelConfig, num_tokens: int) -> int:
    """Return the operations of one layer's attention for each element of `_score_size`, scores of blocks included."""
    sparse = config.sparse
    if sparse is None:
        return 2 * num_tokens * (num_tokens + 1)
    lengths = range(1, num_tokens + 1)
    seen = sum(_seen_tokens(config, length) for length in lengths)
    scored = sum(length // 16 + length // 64 for length in lengths if sparse.leaves_out(length))
    return 4 * seen + 2 * scored

"""Sizes of the CUDA executor's own buffers in the arena: block tables, slot states, rows of a step, kernel workspace.

They take a description of the device only, not the device itself, so `cpmrt plan` can use them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.config.layers import ExpertsMlp, GroupedAttention, LatentAttention, LightningAttention
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.load.repack import staging_buffers
from cpmrt.cuda.ops.attention.attention import AttentionPlan
from cpmrt.cuda.ops.cuda_ops import attention_plan
from cpmrt.cuda.ops.gemm import GEMM_WORKSPACE
from cpmrt.cuda.ops.linear_packed.products import packed_regions, packed_tables
from cpmrt.cuda.ops.products import product_workspace
from cpmrt.cuda.ops.screened_head import ScreenPlan, copy_spec, screened_spec
from cpmrt.cuda.step.structs import SLOT_STATE, STEP_CONTEXT
from cpmrt.dtypes import ElementType
from cpmrt.errors import UnsupportedModelError
from cpmrt.executor import MAX_CERTAIN, MAX_ROWS
from cpmrt.memory.caches import CacheLayout, pages_for
from cpmrt.models.decoder import cache_layout
from cpmrt.models.layers import EMBED, HEAD
from cpmrt.models.planning import ExecutorNeeds
from cpmrt.tensor_spec import BufferSpec, TensorSpec

if TYPE_CHECKING:
    from cpmrt.cuda.ops.latent import LatentPlan

_FEW_ROWS = 8
"""The rows of a step that there is always memory for: one sequence with a short run of certain tokens."""
_ROW_COUNTS = (1, 2, 4, 8, 16, 32, MAX_ROWS)
BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096)
"""Sizes of prefill chunks in rows, padding included."""


def buckets(prefill_chunk: int) -> tuple[int, ...]:
    """Return the chunk sizes that prefill graphs are captured for; the last one has room for `prefill_chunk` tokens."""
    smaller = [size for size in BUCKETS if size < prefill_chunk]
    return (*smaller, next((size for size in BUCKETS if size >= prefill_chunk), prefill_chunk))


def most_rows(engine: EngineConfig) -> int:
    """Return the most rows that a step may have: those of a full prefill chunk, or of a decode step."""
    return max(buckets(engine.prefill_chunk)[-1], MAX_ROWS)


def most_step_rows(config: ModelConfig, engine: EngineConfig) -> int:
    """Return the most rows of a step other than a prefill chunk.

    With latent attention they are as few as the settings allow, since each row has megabytes of workspace.
    """
    if engine.speculation or config.of_kind(LatentAttention) is None:
        return MAX_ROWS
    return max(row_counts(engine.max_sequences)[-1], _FEW_ROWS)


def certain_rows(config: ModelConfig, engine: EngineConfig, caches: CacheLayout) -> int:
    """Return the most rows of a decode step whose slots bring certain tokens; 0 with recurrent states, which take one
    token a step."""
    most = engine.max_sequences * (1 + MAX_CERTAIN)
    return 0 if caches.has_state else min(most, most_step_rows(config, engine))


def row_counts(max_sequences: int) -> tuple[int, ...]:
    """Return the numbers of rows that decode graphs are captured for, up to the first that holds all sequences."""
    smaller = [count for count in _ROW_COUNTS if count < max_sequences]
    return (*smaller, next(count for count in _ROW_COUNTS if count >= max_sequences))


def cuda_tables(
    config: ModelConfig, engine: EngineConfig, max_context: int, device: Device
) -> tuple[BufferSpec, ...]:
    """Return the buffers that live as long as the executor."""
    sequences = engine.max_sequences
    return (
        *_attention(config, engine, max_context, device).tables,
        lasting_buffer("block_tables", np.int32, sequences, pages_for(max_context)),
        lasting_buffer("slot_states", np.uint8, sequences, SLOT_STATE.itemsize, zeroed=True),
        lasting_buffer("token_counts", np.uint32, sequences, config.vocab_size, zeroed=True),
        lasting_buffer("step_context", np.uint8, STEP_CONTEXT.itemsize, zeroed=True),
        lasting_buffer("sampled_slots", np.int32, MAX_ROWS),
        GEMM_WORKSPACE,
        *_expert_tables(config),
    )


def _expert_tables(config: ModelConfig) -> tuple[BufferSpec, ...]:
    """Return the lasting buffers of a model's experts, if it has some."""
    if not isinstance(config.mlp, ExpertsMlp):
        return ()
    from cpmrt.cuda.ops.experts import expert_table  # few models have experts

    return (expert_table(config.mlp, config.hidden_size),)


def _attention(
    config: ModelConfig, engine: EngineConfig, max_context: int, device: Device
) -> AttentionPlan | LatentPlan:
    caches = cache_layout(config, max_context, engine.max_sequences, engine.kv_dtype)
    step_rows = most_step_rows(config, engine)
    return attention_plan(config.for_context(max_context), device, caches, most_rows(engine), step_rows)


def row_buffers(max_rows: int) -> tuple[BufferSpec, ...]:
    """Return the buffers for the rows of a step, at most `max_rows`: tokens, positions, slots, and a chunk's place."""
    return (
        lasting_buffer("token_ids", np.int32, max_rows, zeroed=True),
        lasting_buffer("positions", np.int32, max_rows, zeroed=True),
        lasting_buffer("slots", np.int32, max_rows),
        lasting_buffer("chunk", np.int32, 4, zeroed=True),
    )


def lasting_buffer(name: str, dtype: ElementType, *shape: int, zeroed: bool = False) -> BufferSpec:
    """Return a buffer that lives as long as the executor, or during a whole step."""
    return BufferSpec(name, shape, EMBED, HEAD, dtype, zeroed=zeroed)


def cuda_needs(
    config: ModelConfig, engine: EngineConfig, specs: Sequence[TensorSpec], device: Device
) -> ExecutorNeeds:
    """Return the buffers of the executor in the arena, without a draft's. Raises UnsupportedModelError, ConfigError."""
    max_rows, screened = most_rows(engine), screened_spec(specs) if engine.lm_head_screen else None
    step_rows = MAX_ROWS if engine.speculation else row_counts(engine.max_sequences)[-1]
    screen = None if screened is None else ScreenPlan.of(screened.shape, device, step_rows)
    products_of = specs if screened is None else (*specs, copy_spec(screened.shape))
    counters = packed_tables(products_of, device)
    products = product_workspace(products_of, config, max_rows, device)

    def attention(max_context: int) -> tuple[BufferSpec, ...]:
        return _attention(config, engine, max_context, device).workspace

    def tables(max_context: int) -> tuple[BufferSpec, ...]:
        of_screen = () if screen is None else screen.tables()
        return (*cuda_tables(config, engine, max_context, device), *counters, *of_screen)

    return ExecutorNeeds(
        tables=tables,
        workspace=(*row_buffers(max_rows), *products, *staging_buffers(specs), *(screen.workspace() if screen else ())),
        context_workspace=attention,
        max_rows=max_rows,
        logit_rows=MAX_ROWS,
        packed=partial(packed_regions, device),
    )


def check_supported(config: ModelConfig) -> None:
    """Raise UnsupportedModelError for layers or shapes that the kernels do not take."""
    lightning, latent = config.of_kind(LightningAttention), config.of_kind(LatentAttention)
    kinds = {type(layer.mixer) for layer in config.layers}
    if not any(kinds <= some for some in ({GroupedAttention, LightningAttention}, {LatentAttention})):
        what = "the CUDA executor does not take these layers together"
        expected = "latent attention alone, or lightning attention beside grouped attention"
        actual = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise UnsupportedModelError(what, expected=expected, actual=actual, fix="use executor='reference'")
    sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.mlp.intermediate_size}
    if lightning:
        sizes["lightning_nh * lightning_head_dim"] = lightning.width
    wanted = {name: (size, size % 64 == 0, "a multiple of 64") for name, size in sizes.items()}
    if latent:
        from cpmrt.cuda.ops.latent import latent_sizes  # few models have latent attention

        wanted |= latent_sizes(latent)
    else:
        attention = config.grouped_attention
        wanted["num_attention_heads * head_dim"] = (attention.q_size, attention.q_size % 64 == 0, "a multiple of 64")
        wanted["head_dim"] = (attention.head_dim, attention.head_dim in (64, 96, 128), "64, 96 or 128")
    if lightning:
        wanted["lightning_head_dim"] = (lightning.head_dim, lightning.head_dim in (64, 128), "64 or 128")
    for name, (size, is_taken, expected) in wanted.items():
        if not is_taken:
            what = f"the CUDA executor does not take this {name}"
            raise UnsupportedModelError(what, expected=expected, actual=size, fix="use executor='reference'")

"""The draft's passes on the GPU: over a prefill chunk, over tokens that wait, over a frontier of the tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.draft.block import block_modules, block_tables
from cpmrt.cuda.draft.memory import tree_tables
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.load.repack import STAGING, staging_buffers
from cpmrt.cuda.ops.attention.attention import AttentionPlan
from cpmrt.cuda.ops.attention.decode import DecodePlan
from cpmrt.cuda.ops.cuda_ops import CudaOps
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.ops.linear_packed.layout import PackedWeight
from cpmrt.cuda.ops.linear_packed.products import packed_tables
from cpmrt.cuda.ops.products import product_workspace
from cpmrt.cuda.step.forward import StepForward
from cpmrt.cuda.step.memory import cuda_needs
from cpmrt.memory.caches import CacheLayout
from cpmrt.models.draft import LAST_PHASE, PREFIX, Draft, DraftModel
from cpmrt.models.drafts.dspark import MarkovWeights
from cpmrt.models.planning import ExecutorNeeds
from cpmrt.ops import Rows
from cpmrt.speculation.procedure import MAX_WAITING
from cpmrt.tensor_spec import BufferSpec, TensorSpec

SCRATCH = "draft_scratch."
"""Before the names of the buffers that the draft's ops need in its own sizes."""


def executor_needs(
    config: ModelConfig,
    engine: EngineConfig,
    specs: Sequence[TensorSpec],
    draft: Draft | None,
    device: Device,
) -> ExecutorNeeds:
    """What the executor keeps for a target with the weights `specs` and whatever drafts for it, for `models.planning`.

    Raises UnsupportedModelError.
    """
    needs = cuda_needs(config, engine, specs, device)
    if draft is None:
        return needs
    block_modules(draft)  # which raises what the kernels do not take
    return _with_draft(needs, draft, specs, device, max_sequences=engine.max_sequences)


def _with_draft(
    needs: ExecutorNeeds,
    draft: Draft,
    specs: Sequence[TensorSpec],
    device: Device,
    *,
    max_sequences: int,
) -> ExecutorNeeds:
    """Add what the draft needs to `needs`, which are the target's."""
    assert needs.max_rows is not None
    max_rows = needs.max_rows
    workspace = [spec for spec in needs.workspace if spec.name != STAGING]
    workspace += staging_buffers((*specs, *draft.tensors))

    counters = packed_tables(_weights(draft, specs), device)

    def tables(max_context: int) -> tuple[BufferSpec, ...]:
        own = _draft_tables(draft, counters, max_context, device)
        tree = tree_tables(max_sequences, max_context, max_rows, draft.config.hidden_width)
        return (*needs.tables(max_context), *tree, *block_tables(draft), *own)

    return replace(
        needs,
        tables=tables,
        workspace=(*workspace, *_draft_workspace(draft, specs, max_rows, device)),
    )


def _weights(draft: Draft, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """What the draft's products read: its own weights, and the target's head among `specs` if it has none."""
    if any(spec.name == f"{PREFIX}lm_head" for spec in draft.tensors):
        return draft.tensors
    return (*draft.tensors, *(spec for spec in specs if spec.name == "lm_head"))


def _draft_tables(
    draft: Draft, counters: Sequence[BufferSpec], max_context: int, device: Device
) -> tuple[BufferSpec, ...]:
    """Return the buffers of the draft's ops that live as long as the executor; `counters`: of its products."""
    config = draft.config.decoder
    if config is None:
        return ()
    attention = DecodePlan.of(config.attention, device, max_context)
    return tuple(_scratch(spec) for spec in (*attention.tables, *counters))


def _draft_workspace(
    draft: Draft, specs: Sequence[TensorSpec], max_rows: int, device: Device
) -> tuple[BufferSpec, ...]:
    """Return the buffers of one pass of at most `max_rows` rows; nothing of the target's runs meanwhile."""
    config = draft.config.decoder
    if config is None:
        return ()
    products = product_workspace(_weights(draft, specs), config, max_rows, device)
    return tuple(_scratch(spec) for spec in products)


def _scratch(spec: BufferSpec) -> BufferSpec:
    return BufferSpec(SCRATCH + spec.name, spec.shape, 0, LAST_PHASE, spec.dtype)


class DraftForward:
    """Launches the passes of a draft with layers on the regions of a memory plan.

    Which rows a pass has, `TreeKernels` writes to the arrays `draft_*`.
    """

    def __init__(
        self,
        draft: Draft,
        device: Device,
        launcher: Launcher,
        gemm: Gemm,
        arrays: Mapping[str, Any],
        caches: CacheLayout,
    ):
        config = draft.config.layers_config
        self._draft, self._arrays = draft.config, arrays
        self._model = DraftModel.bind(draft.config, arrays, caches, _fc_halves(arrays))
        scratch = {name.removeprefix(SCRATCH): array for name, array in arrays.items() if name.startswith(SCRATCH)}
        scratch |= {"slots": arrays["draft_slots"], "chunk": arrays["draft_chunk"]}
        plan = AttentionPlan.of(config.attention, device, caches, max_rows=len(arrays["draft.x"]))
        self._ops = CudaOps(device, launcher, gemm, scratch, plan)

    def chunk(self, num_rows: int) -> None:
        """Run the rows of a prefill chunk; nothing is drafted."""
        self._model.see(self._ops, self._rows(num_rows, is_prefill=True), self._hidden(num_rows))

    def waiting(self, num_rows: int) -> None:
        """Run at most 64 tokens that the draft has not seen; the logits of the last one are in row 0, unless the draft
        drafts blocks."""
        rows, hidden, last = self._rows(num_rows), self._hidden(num_rows), slice(num_rows - 1, num_rows)
        if self._draft.block is not None:
            self._model.see(self._ops, rows, hidden)
        else:
            self._model.forward(self._ops, rows, hidden, last, is_first=True)

    def block(self, num_rows: int) -> None:
        """Run the rows of a block; its outputs and their logits are `block_states` and `logits`."""
        self._model.block(self._ops, replace(self._rows(num_rows), reach=self._arrays["draft_reach"]))

    def block_states(self) -> DeviceArray:
        """Return the normalised outputs of the last block."""
        states: DeviceArray = self._arrays["draft.states"]
        return states

    def markov_weights(self) -> MarkovWeights:
        """Return what chooses the tokens of a block."""
        return self._model.markov_weights()

    def frontier(self, num_rows: int) -> None:
        """Run rows of a tree's newest level; all have logits."""
        a = self._arrays
        places = (a[name][:num_rows] for name in ("draft_locations", "draft_masks", "draft_base"))
        parents = a["draft.parents"][:num_rows] if self._draft.is_eagle else None
        self._model.forward(self._ops, self._rows(num_rows, *places), parents, slice(num_rows), is_first=False)

    def outputs(self, rows: slice) -> DeviceArray | None:
        """Return rows of the last pass' output, which a later pass continues; None where it does not."""
        return self._arrays["draft.x"][rows] if self._draft.is_eagle else None

    def parents(self, num_rows: int) -> DeviceArray | None:
        """Return where the outputs go that a pass of `frontier` continues; None where it continues none."""
        return self._arrays["draft.parents"][:num_rows] if self._draft.is_eagle else None

    def logits(self, num_rows: int) -> DeviceArray:
        """Return the logits of the last pass, whose row 0 is the first row that has any."""
        logits: DeviceArray = self._arrays["draft.logits"]
        return logits[:num_rows]

    def _hidden(self, num_rows: int) -> DeviceArray | None:
        return self._arrays["hidden"][:num_rows] if self._draft.hidden_width else None

    def _rows(self, num_rows: int, *places: DeviceArray, is_prefill: bool = False) -> Rows:
        a = self._arrays
        tokens, positions, slots = (a[f"draft_{name}"][:num_rows] for name in ("token_ids", "positions", "slots"))
        return Rows(tokens, positions, slots, a["block_tables"], is_prefill, *places)


def waiting_rows(draft: Draft) -> int:
    """Tokens that the draft has not seen when a speculative step begins, at most: what a step before may have given."""
    return max(shape.max_emitted for shape in draft.shapes)


def every_shape(draft: Draft, target: StepForward, forward: DraftForward | None, buckets: tuple[int, ...]) -> None:
    """Each forward of steps with a draft once: the target's over trees, the draft's over whatever it sees."""
    for shape in draft.shapes:
        target.tree(shape.num_nodes)
    target.path_accepted()
    if forward is None:
        return
    for bucket in buckets:
        forward.chunk(bucket)
    for count in (waiting_rows(draft), MAX_WAITING):
        forward.waiting(count)
    if draft.block_rows:
        forward.block(draft.block_rows)
        return
    for shape in draft.shapes:
        if shape.num_passes > 1:
            forward.frontier(shape.top_k)


def _fc_halves(arrays: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a split `fc` as the two matrices that it holds one after the other; nothing where there is none."""
    whole = arrays.get("draft.fc_halves")
    if whole is None:
        return ()
    half = whole.shape[0] // 2
    return whole.halves() if isinstance(whole, PackedWeight) else (whole[:half], whole[half:])

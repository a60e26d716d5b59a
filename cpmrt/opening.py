"""Opens a model: makes a blueprint of its folder and the settings, on which every executor and command builds.

A blueprint says how the weights of a model and of its draft will be held, where they come from, and what memory a
context needs. It takes no memory of a device. The part that depends on the executor comes from its `Target`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from cpmrt.caller_warnings import warn_caller
from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.config.speculate_argument import named_drafts
from cpmrt.dtypes import DType
from cpmrt.memory.plan import MemoryPlan
from cpmrt.models.planning import ExecutorNeeds, fit_model, open_weights, plan_model, position_limit, weight_specs
from cpmrt.tensor_spec import HEAD_COPY, TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.draft_folder import resolve, with_speculation
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.repository import has_weights

# Imported for types only: a start without a draft needs none of what makes drafts.
if TYPE_CHECKING:
    from cpmrt.models.draft import Draft

Parts = tuple[tuple[tuple[TensorSpec, ...], Checkpoint | None], ...]
"""Groups of weights, each with the checkpoint that they are read from; None: they are random."""
_SHARE_OF_HEAD_COPY = 64
"""A copy of the head that nobody asked for takes at most one part in so many of the memory budget.

It makes a step 1.5 to 5 % faster, but where memory is short, other programs and a longer context of the next start need
it more. With 24 GB MiniCPM4-8B has such a copy, and with 8 GB MiniCPM4-0.5B does.
"""


class Target(Protocol):
    """The part of a blueprint that an executor decides: the types and sizes of what it keeps."""

    def dtype(self, config: ModelConfig, settings: EngineConfig) -> DType:
        """Return the storage type of weights, keys, values and activations. Raises ConfigError."""
        ...

    @property
    def itemsize(self) -> int:
        """Bytes that an element of the storage type takes in the arena."""
        ...

    def check(self, config: ModelConfig, settings: EngineConfig) -> None:
        """Raise UnsupportedModelError or ConfigError for a decoder, or settings, that the executor cannot run."""
        ...

    def held(
        self, specs: tuple[TensorSpec, ...], checkpoint: Checkpoint | None = None, dtype: DType | None = None
    ) -> tuple[TensorSpec, ...]:
        """Return weights as the executor will hold them: in 16 bits those in a format that it cannot hold.

        For the target model, not for a draft, the caller passes its `checkpoint`, if there is one, and its `dtype`.
        """
        ...

    def has_screenable_head(self, specs: tuple[TensorSpec, ...]) -> bool:
        """Whether a step can read an 8-bit copy of the output head among these weights, and few rows of the head."""
        ...

    def needs(
        self, config: ModelConfig, settings: EngineConfig, specs: tuple[TensorSpec, ...], draft: Draft | None
    ) -> ExecutorNeeds:
        """Return the buffers that the executor keeps beside the model's own. Raises UnsupportedModelError."""
        ...


@dataclass(frozen=True)
class Blueprint:
    """A model as an executor will hold it. `parts` say what is read from where; empty if nothing will be loaded."""

    config: ModelConfig
    settings: EngineConfig
    target: Target
    specs: tuple[TensorSpec, ...]
    draft: Draft | None = None
    parts: Parts = ()

    @classmethod
    def of(cls, config: ModelConfig, settings: EngineConfig, target: Target) -> Blueprint:
        """Return the blueprint of a model without a draft from its config alone."""
        return cls(config, settings, target, weight_specs(config, settings))

    @cached_property
    def dtype(self) -> DType:
        """The storage type. Raises ConfigError."""
        return self.target.dtype(self.config, self.settings)

    @property
    def position_limit(self) -> int:
        """The context that was asked for, or the model's own, in tokens. Raises ConfigError."""
        return position_limit(self.config, self.settings)

    @cached_property
    def needs(self) -> ExecutorNeeds:
        """The buffers that the executor keeps beside the model's own. Raises UnsupportedModelError."""
        return self.target.needs(self.config, self.settings, self.specs, self.draft)

    def plan(self, max_context: int) -> MemoryPlan:
        """Return the memory plan for exactly `max_context` tokens a sequence.

        It has a copy of the head that screens it only if that was asked for (`lm_head_screen` True).
        """
        return plan_model(
            self.config, self.settings, itemsize=self.target.itemsize, max_context=max_context, needs=self.needs,
            specs=self.specs, draft=self.draft,
        )  # fmt: skip

    def screened_plan(self, max_context: int, budget: int | None = None) -> MemoryPlan | None:
        """Return the plan with an automatic copy of the head that screens it, or None if a start keeps none.

        A start keeps one if `lm_head_screen` is None, the head can be screened, the copy takes little of `budget` bytes
        (`_SHARE_OF_HEAD_COPY`), and the whole plan fits them. Without a budget there is memory for everything.
        """
        settings = self.settings
        is_open = settings.lm_head_screen is None and settings.lm_head_bits is None
        if not (is_open and self.target.has_screenable_head(self.specs)):
            return None
        plan = replace(self, settings=replace(settings, lm_head_screen=True)).plan(max_context)
        if budget is None:
            return plan
        is_small = plan.part_bytes[HEAD_COPY] <= budget // _SHARE_OF_HEAD_COPY
        return plan if is_small and plan.total_bytes <= budget else None

    def fit(self, budget: int, free: int | None = None) -> MemoryPlan:
        """Return the plan within `budget` bytes. Raises MemoryPlanError.

        An automatic copy of the head (`screened_plan`) never makes the context smaller. Where only `free` bytes can be
        allocated, it fits these too: a budget may promise more.
        """
        if screened := self.screened_plan(self.position_limit, budget if free is None else min(budget, free)):
            return screened
        return fit_model(
            self.config, self.settings, itemsize=self.target.itemsize, budget=budget, needs=self.needs,
            specs=self.specs, draft=self.draft,
        )  # fmt: skip


def fetch_weights(folder: ModelFolder, settings: EngineConfig, target: Target, budget: int) -> None:
    """Fetch the weights of a model on a hub unless they are here, after checking that they can run in `budget` bytes.

    The check needs the config alone. Raises CheckpointError, ConfigError, UnsupportedModelError, MemoryPlanError.
    """
    if not folder.lacks_weights:
        return
    target.dtype(folder.config, settings)
    target.check(folder.config, settings)
    Blueprint.of(folder.config, settings, target).fit(budget)
    folder.fetch_weights()


@contextmanager
def open_blueprint(folder: ModelFolder, settings: EngineConfig, target: Target) -> Iterator[Blueprint]:
    """Open the checkpoints of the model and of its draft, compare them with their configs, and describe both.

    The checkpoints are open inside the context. Raises CheckpointError, ConfigError, UnsupportedModelError.
    """
    dtype = target.dtype(folder.config, settings)
    _warn_of_lists(folder.config, position_limit(folder.config, settings))
    target.check(folder.config, settings)
    with ExitStack() as stack:
        checkpoint, specs = stack.enter_context(open_weights(folder, settings))
        specs = target.held(specs, checkpoint, dtype)
        checkpoints, draft = stack.enter_context(_opened_draft(folder, settings, specs, target))
        parts: Parts = ((specs, checkpoint),)
        if draft is not None:
            parts += tuple(_draft_parts(draft, (checkpoint, *checkpoints)))
            _check_layers(draft, settings, target)
        yield Blueprint(folder.config, settings, target, specs, draft, parts)


def _draft_parts(
    draft: Draft, checkpoints: tuple[Checkpoint | None, ...]
) -> Iterator[tuple[tuple[TensorSpec, ...], Checkpoint | None]]:
    """Yield the weights of a draft and of its inner draft; `checkpoints` begin with the target's."""
    targets, own, *_ = checkpoints
    yield draft.specs, own
    yield (draft.head,) if draft.head else (), targets
    if draft.inner is not None:
        yield from _draft_parts(draft.inner, checkpoints[1:])


def _check_layers(draft: Draft, settings: EngineConfig, target: Target) -> None:
    for one in (draft, draft.inner):
        if one is not None and one.config.decoder is not None:
            target.check(one.config.decoder, settings)


def _warn_of_lists(config: ModelConfig, limit: int) -> None:
    """Warn if LongRoPE rotates short texts by its long list; transformers rotates them by the short one."""
    rope = config.rope
    if rope.list_by == "context" and rope.mixes_lists(limit):
        original = rope.original_max_positions
        warn_caller(
            f"LongRoPE: with a context of {limit} tokens every text is rotated by the long list; transformers rotates "
            f"texts of up to {original} tokens by the short one. For short texts choose max_context={original}, or "
            'hf_overrides={"rope_scaling": {"list_by": "length"}}, which takes the short list up to there.'
        )


def described(
    folder: ModelFolder,
    settings: EngineConfig,
    target: Target,
    draft: str | None = None,
    speculate: str | Mapping[str, Any] = "auto",
    *,
    reads_weights: bool = True,
) -> Blueprint:
    """Return the blueprint of a model that will not be loaded, whose weights need not be here.

    Weights that are here are looked at, the model's only with `reads_weights`: they tell more than a config.json does,
    such as which layers are quantised or ternary. `draft` and `speculate` as `LLM` takes them.
    """
    if reads_weights and settings.load_format != "dummy" and has_weights(folder.path):
        with Checkpoint.open(folder.path) as checkpoint:
            specs = weight_specs(folder.config, settings, checkpoint)
            specs = target.held(specs, checkpoint, target.dtype(folder.config, settings))
    else:
        specs = weight_specs(folder.config, settings)
    path = folder.path
    for name in named_drafts(draft, speculate):
        path = resolve(name, path, weights=False)
        if not has_weights(path):
            settings = replace(settings, load_format="dummy")
    settings = with_speculation(settings, folder, draft, speculate)
    with _opened_draft(folder, settings, specs, target) as (_, found):
        return Blueprint(folder.config, settings, target, specs, found)


@contextmanager
def _opened_draft(
    folder: ModelFolder, settings: EngineConfig, specs: tuple[TensorSpec, ...], target: Target
) -> Iterator[tuple[tuple[Checkpoint | None, ...], Draft | None]]:
    """Yield the checkpoints of the draft, and the draft as the target holds it; without speculation it is None."""
    if settings.speculation is None:
        yield (), None
        return
    from cpmrt.models.draft_weights import open_draft  # no start without a draft needs it

    with open_draft(folder, settings, specs) as (checkpoints, draft):
        yield checkpoints, _held(draft, target)


def _held(draft: Draft, target: Target) -> Draft:
    """Return the draft with its weights as the target can hold them."""
    head = target.held((draft.head,)) if draft.head else ()
    inner = draft.inner and _held(draft.inner, target)
    return replace(draft, specs=target.held(draft.specs), head=head[0] if head else None, inner=inner)

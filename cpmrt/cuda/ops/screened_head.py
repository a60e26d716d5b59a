"""The logits that a step can choose a token from, without reading the whole output head.

An 8-bit copy of a head in 16 bits gives each logit with a proven bound of its error. Only the tokens that can be chosen
under these bounds are computed from the head itself, with the bits that the whole product gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import ceil

import numpy as np

from cpmrt.config import Sampling
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.linear import BLOCK_THREADS, plan_linear
from cpmrt.cuda.ops.linear_packed.layout import SLICE_COLUMNS, TILE_ROWS, PackedLayout, PackedWeight, packed_layout
from cpmrt.errors import ConfigError
from cpmrt.models.layers import EMBED, HEAD
from cpmrt.tensor_spec import HEAD_COPY, SCREEN, BufferSpec, TensorSpec

COPY = "head_copy"
"""The name of the 8-bit copy among weights."""
_ROW_BUILDS = (1, 8, 16, 32)
MOST_ROWS = _ROW_BUILDS[-1]
"""The most rows of a screened step: with more, too many tokens are candidates for one row or another."""
MOST_TOP_K = 64
"""The largest top_k for which it pays to screen the head: with a larger one too many tokens are candidates."""
_FILTERS = ("temperature", "top_k", "top_p", "min_p")
"""The settings of `Sampling` under which a head may be screened."""
MOST_COLUMNS = 16384
_UNIT_COLUMNS, _STEPS_OF_A_UNIT = 64, 4
_LANES, _COPY_WARPS = 32, 4
_WARPS = BLOCK_THREADS // _LANES
"""Warps of a block: in linear.cu each has a run of K, in rescore.cu each finds a lower bound of the best logit."""


@dataclass(frozen=True, slots=True)
class CopyConstants:
    """Compile-time constants of screen_head.cu, which explains them."""

    in_features: int
    runs: int
    scale_group: int
    weight_bits: int
    zeros: int
    steps: int


@dataclass(frozen=True, slots=True)
class HeadRowsConstants:
    """Compile-time constants of head_rows.cu, which explains them."""

    in_features: int
    owners: int


@dataclass(frozen=True, slots=True)
class RescoreConstants:
    """Compile-time constants of rescore.cu, which explains them."""

    in_features: int
    vocab: int
    cluster: int
    blocks: int
    rows: int


SCREEN_HEAD = KernelSpec(
    "screen_head", "screened_head/screen_head.cu", constants=CopyConstants,
    reason="loading: the copy of a head that screens it",
)  # fmt: skip
HEAD_ROWS = KernelSpec("head_rows", "screened_head/head_rows.cu", "lm_head", HeadRowsConstants, hot=True)
RESCORE = KernelSpec(
    "rescore", "screened_head/rescore.cu", "lm_head", RescoreConstants, hot=True,
    waits_across_blocks=lambda macros: True,
)  # fmt: skip


def can_screen(sampling: Sampling) -> bool:
    """Whether few tokens can be chosen under this sampling, so that it pays to screen the head.

    With other values of `_FILTERS` the token would be right too, but most tokens might have to be computed one by one.
    Any other setting takes the whole head, also one that rescore.cu does not know.
    """
    if any(getattr(sampling, field.name) != field.default for field in fields(sampling) if field.name not in _FILTERS):
        return False
    if sampling.temperature == 0.0 or 0 < sampling.top_k <= MOST_TOP_K:
        return True
    return sampling.min_p > 0.0 and sampling.top_p == 1.0 and sampling.top_k == 0


def screened_spec(specs: Iterable[TensorSpec]) -> TensorSpec:
    """Return the head among a model's weights, perhaps its embedding. Raises ConfigError if it is not in 16 bits."""
    by_name = {spec.name: spec for spec in specs}
    head = by_name.get("lm_head") or by_name["embed_tokens"]
    if head.quant is not None:
        raise ConfigError(
            "lm_head_screen", expected="a head in 16 bits", actual=f"one in {head.quant.bits} bits",
            fix="leave it out: the screen would be no smaller than the head",
        )  # fmt: skip
    if head.shape[1] % SLICE_COLUMNS or head.shape[1] > MOST_COLUMNS:
        expected = f"a hidden_size that is a multiple of {SLICE_COLUMNS}, at most {MOST_COLUMNS}"
        raise ConfigError("lm_head_screen", expected=expected, actual=head.shape[1])
    return head


def has_screenable_head(specs: Iterable[TensorSpec]) -> bool:
    """Whether the head among a model's weights can be screened."""
    try:
        screened_spec(specs)
    except ConfigError:
        return False
    return True


def copy_spec(shape: tuple[int, ...]) -> TensorSpec:
    """Return the 8-bit copy of a head of this shape as a weight, which no checkpoint holds."""
    return TensorSpec(COPY, shape, (), SCREEN, "head")


@dataclass(frozen=True)
class ScreenPlan:
    """Sizes of a screened head [V, K] on a device: those of its copy and of the buffers that its kernels exchange."""

    layout: PackedLayout
    cluster: int
    blocks: int
    most_rows: int

    @classmethod
    def of(cls, shape: tuple[int, ...], device: Device, max_rows: int) -> ScreenPlan:
        """Plan a head [V, K] in 16 bits for steps of at most `max_rows` rows, of which those with more than `MOST_ROWS`
        read the whole head."""
        layout = packed_layout(copy_spec(shape), device)
        cluster = plan_linear("head", shape, 1, device).constants.cluster
        blocks = min(device.num_sms, ceil(layout.out_features / BLOCK_THREADS))
        return cls(layout, cluster, blocks, min(max_rows, MOST_ROWS))

    def tables(self) -> Iterator[BufferSpec]:
        """Yield the buffers that live as long as the executor; the counters begin at zero."""
        yield BufferSpec(f"{COPY}.codes", (self.layout.num_bytes,), EMBED, HEAD, np.uint8, HEAD_COPY)
        yield BufferSpec("head_bounds", (self.layout.out_features,), EMBED, HEAD, np.float32, HEAD_COPY)
        yield BufferSpec("screen_counters", (2,), EMBED, HEAD, np.uint64, HEAD_COPY, zeroed=True)

    def workspace(self) -> Iterator[BufferSpec]:
        """Yield the buffers that live during the head of a step."""
        rows = self.most_rows
        yield BufferSpec("screened_logits", (rows, self.layout.out_features), HEAD, HEAD, np.float32)
        yield BufferSpec("head_rows", (rows, self.layout.in_features), HEAD, HEAD)
        yield BufferSpec("head_norms", (rows,), HEAD, HEAD, np.float32)
        yield BufferSpec("screen_best", (rows, self.blocks * _WARPS), HEAD, HEAD, np.uint32)


class ScreenedHead:
    """Launches the head of steps of at most `plan.most_rows` rows.

    `lm_head` launches the op of this name, also with a packed weight; `arrays` holds the buffers of `plan` by name, and
    the step's slots, their states and its context; `head` [V, K] is the head in 16 bits. At the address `results` each
    step reports how many tokens it computed exactly, in the last word of its record.
    """

    def __init__(
        self, launcher: Launcher, lm_head: Callable[..., None], plan: ScreenPlan, arrays: Mapping[str, DeviceArray],
        head: DeviceArray, results: np.uint64 | None,
    ):  # fmt: skip
        self._launch, self._lm_head, self._plan, self._arrays, self._head = launcher, lm_head, plan, arrays, head
        self._results, self.most_rows = results, plan.most_rows
        self._copy = PackedWeight(arrays[f"{COPY}.codes"], None, plan.layout)
        self._vocab, self._hidden = head.shape

    def fill(self) -> None:
        """Make the copy and its bounds, once the head is loaded."""
        sizes = self._plan.layout.sizes
        constants = CopyConstants(
            sizes["in_features"], sizes["runs"], sizes["scale_group"], sizes["weight_bits"], sizes["zeros"],
            steps=_STEPS_OF_A_UNIT * ceil(self._hidden / _UNIT_COLUMNS / (_WARPS * self._plan.cluster)),
        )  # fmt: skip
        grid = ceil(self._vocab / (TILE_ROWS * _COPY_WARPS))
        outputs = self._copy.data, self._arrays["head_bounds"]
        self._launch(SCREEN_HEAD, constants, grid, _LANES * _COPY_WARPS, *outputs, self._head, np.int32(self._vocab))

    def __call__(
        self, logits: DeviceArray, x: DeviceArray, norm: DeviceArray, eps: float, divisor: float,
        *, is_counted: bool = True,
    ) -> None:  # fmt: skip
        """Fill `logits` [T, V]: exact where the request in the row's slot may choose the token, else -infinity.

        `x` [T, K] are the last layer's outputs. `is_counted`: whether the step's command has been counted on the device
        by now; that of a tree is counted only when the step ends.
        """
        a, plan, num_rows = self._arrays, self._plan, len(x)
        rows, norms, screened = (a[name][:num_rows] for name in ("head_rows", "head_norms", "screened_logits"))
        owners = HeadRowsConstants(self._hidden, _WARPS * plan.cluster)
        self._launch(HEAD_ROWS, owners, num_rows, BLOCK_THREADS, rows, norms, x, norm, np.float32(eps))
        self._lm_head(screened, rows, None, self._copy, eps, divisor)
        row_build = next(rows for rows in _ROW_BUILDS if num_rows <= rows)
        constants = RescoreConstants(self._hidden, self._vocab, plan.cluster, plan.blocks, row_build)
        self._launch(
            RESCORE, constants, plan.blocks, BLOCK_THREADS, self._results, logits, a["screen_best"],
            a["screen_counters"], a["step_context"], screened, a["head_bounds"], rows, norms, self._head,
            a["slot_states"], a["slots"], np.int32(num_rows), np.float32(divisor), np.int32(is_counted),
            prefers_shared=True,
        )  # fmt: skip

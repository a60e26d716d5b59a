"""A screened output head on a device with rows for it, and the logits of the whole head."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from linear_cases import DIVISOR, EPS

from cpmrt.config import Sampling
from cpmrt.cuda.ops.linear import StepProduct, launch_linear
from cpmrt.cuda.ops.linear_packed.products import PackedProducts, packed_tables, packed_workspace
from cpmrt.cuda.ops.screened_head import MOST_ROWS, ScreenedHead, ScreenPlan, copy_spec
from cpmrt.cuda.step.commands import slot_state
from cpmrt.cuda.step.structs import RESULT_RECORD, RING_ENTRIES, SLOT_STATE, STEP_CONTEXT
from cpmrt.dtypes import DType, round_to
from cpmrt.executor import Admit
from cpmrt.ops import NOTHING

SHAPES = {"small": (2629, 384), "demo": (4096, 256), "0.5B": (73448, 1024), "odd": (20011, 2048), "8B": (73448, 4096)}
GREEDY = Sampling()
SEQUENCE = 2**32 + 21  # past 32 bits: a word holds its low half


class Head:
    """An output head on the device with its screen; `rescored` runs it on rows that each have a slot."""

    def __init__(self, cuda: Any, weight: Any, dtype: DType):
        self.cuda, self.dtype, self.weight = cuda, dtype, round_to(weight, dtype)
        (self.vocab, self.hidden), self.device = weight.shape, cuda.device
        self.plan, copy = ScreenPlan.of(weight.shape, self.device, MOST_ROWS), copy_spec(weight.shape)
        specs = [*self.plan.tables(), *self.plan.workspace(), *packed_tables([copy], self.device)]
        specs += packed_workspace([copy], None, MOST_ROWS, self.device)  # type: ignore[arg-type]
        with cuda.stream:
            self.arrays = {spec.name: cuda.cupy.zeros(spec.shape, spec.dtype or np.uint16) for spec in specs}
        for name in ("head_bounds", "screened_logits", "head_norms"):
            self.arrays[name].fill(np.nan)
        self.head = cuda.array(weight, dtype)
        context = np.zeros(1, STEP_CONTEXT)
        context["next_entry"] = context["sequence"] = SEQUENCE
        self.arrays["step_context"] = cuda.array(context.view(np.uint8))
        self._results = cuda.array(np.zeros(RING_ENTRIES * RESULT_RECORD.itemsize, np.uint8))
        random = np.random.default_rng(1)
        self.norm = cuda.array(1 + 0.25 * random.standard_normal(self.hidden, np.float32), dtype)
        self.packed = PackedProducts(cuda.launcher(dtype, pdl=True), None, self.arrays, self.device)  # type: ignore[arg-type]
        cuda.cupy.cuda.Device().synchronize()

    @cached_property
    def screen(self) -> ScreenedHead:
        launcher, results = self.cuda.launcher(self.dtype, pdl=True), self._results
        made = ScreenedHead(launcher, self._lm_head, self.plan, self.arrays, self.head, np.uint64(results.data.ptr))
        made.fill()
        self.cuda.cupy.cuda.Device().synchronize()  # as behind loading: products ask for weights early
        return made

    def rounded(self, x: Any) -> Any:
        return round_to(x, self.dtype)

    def product(self, logits: Any, x: Any, norm: Any) -> StepProduct:
        """Return the head's product of rows x on the device; with `norm` None the rows are normalised already."""
        sizes = np.int32(len(x)), np.int32(self.vocab), np.float32(EPS), np.float32(DIVISOR)
        return StepProduct("head", (logits,), x, norm, EPS, sizes)

    def _lm_head(self, logits: Any, x: Any, norm: Any, weight: Any, eps: float, divisor: float) -> None:
        assert (eps, divisor) == (EPS, DIVISOR)
        self.packed.step(self.product(logits, x, norm), weight, NOTHING)

    def whole(self, x: Any) -> Any:
        """Return the logits that the kernel `linear_head` gives for rows x."""
        rows, logits = self.cuda.array(x, self.dtype), self.cuda.array(np.full((len(x), self.vocab), 7, np.float32))
        launch_linear(self.cuda.launcher(self.dtype), self.product(logits, rows, self.norm), self.head, self.device)
        return self.cuda.numpy(logits)

    def rescored(self, x: Any, samplings: list[Sampling | None], *, is_counted: bool = True) -> Any:
        """Return the screened head's logits of rows whose slots have these samplings; None means a row of no slot."""
        states = np.zeros(len(samplings), SLOT_STATE)
        for slot, sampling in enumerate(samplings):
            states[slot] = slot_state(Admit(0, sampling or GREEDY, 0, 1, ()))
        slots = [index if sampling else -1 for index, sampling in enumerate(samplings)]
        self.arrays["slot_states"] = self.cuda.array(states.view(np.uint8).reshape(len(states), -1))
        self.arrays["slots"] = self.cuda.array(np.array(slots, np.int32))
        rows, logits = self.cuda.array(x, self.dtype), self.cuda.array(np.full((len(x), self.vocab), 7, np.float32))
        self.cuda.cupy.cuda.Device().synchronize()
        self.screen(logits, rows, self.norm, EPS, DIVISOR, is_counted=is_counted)
        self._number = SEQUENCE + (not is_counted)
        return self.cuda.numpy(logits)

    @property
    def num_rescored(self) -> int:
        """The number of tokens that the last step rescored, as it reported under its own number."""
        record = self.cuda.numpy(self._results).view(RESULT_RECORD)[(self._number - 1) % RING_ENTRIES]
        number, count = divmod(int(record["words"][-1]), 2**32)
        assert number == self._number % 2**32 and not self.cuda.numpy(self.arrays["screen_counters"])[1]
        return count


def random_head(cuda: Any, name: str, dtype: DType, seed: int = 0) -> Head:
    vocab, hidden = SHAPES[name]
    weight = np.random.default_rng(seed).standard_normal((vocab, hidden), np.float32) * np.float32(2.5 / hidden**0.5)
    return Head(cuda, weight, dtype)


def rows_for(head: Head, count: int, seed: int = 5) -> Any:
    return np.random.default_rng(seed).standard_normal((count, head.hidden), np.float32) * np.float32(1.7)

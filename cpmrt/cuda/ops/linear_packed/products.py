"""Products with packed weights: few rows in one kernel, a chunk with the weight unpacked slice by slice.

Also the weights' regions and the buffers that they need in the plan of the executor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial

import numpy as np

from cpmrt.config import ModelConfig
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray, KernelArgument
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.ops.linear import FETCHING_CAPABILITY, StepProduct, float_bits
from cpmrt.cuda.ops.linear_packed.chunk import ChunkPlan, GatedConstants, most_chunk_rows, plan_chunk
from cpmrt.cuda.ops.linear_packed.constants import LINEAR_PACKED, PREPARE, PREPARE_THREADS, PrepareConstants
from cpmrt.cuda.ops.linear_packed.division import ROW_BUCKETS
from cpmrt.cuda.ops.linear_packed.ffn_row import HeldFfn, num_sums
from cpmrt.cuda.ops.linear_packed.held_layers import HeldLayers
from cpmrt.cuda.ops.linear_packed.layout import PackedWeight, RepackConstants, Weight, packed_layout
from cpmrt.cuda.ops.linear_packed.plan import PackedPlan, plan_packed
from cpmrt.cuda.ops.linear_packed.row_layers import joins_products
from cpmrt.memory.packed_regions import PackedRegion
from cpmrt.models.layers import DOWN, EMBED, GATE_UP, HEAD, QKV
from cpmrt.ops import NOTHING, Handoff
from cpmrt.tensor_spec import BufferSpec, TensorSpec

UNPACKED_BYTES = 64 << 20
"""The most bytes of a weight that are unpacked to 16 bits at a time, in a prefill."""
DEQUANTIZE = KernelSpec(
    "dequantize", "linear_packed/repack.cu", constants=RepackConstants, hot=True,
    reason="packed weights of a long prefill chunk",
)  # fmt: skip
GATHER = KernelSpec("gather_columns", "linear_packed/gather.cu", "project_residual", hot=True)
_plan, _plan_chunk = lru_cache(maxsize=1024)(plan_packed), lru_cache(maxsize=256)(plan_chunk)
_BLOCK = 256
_WIDTH = 8
"""Elements that a thread of the gathering kernel moves."""


def packed_regions(device: Device, spec: TensorSpec) -> tuple[PackedRegion, ...]:
    """Return the regions of a weight with a `quant`: all its bytes, and the order of its columns if it has one."""
    codes, perm = (packed_layout(spec, device).num_bytes,), (spec.shape[1],)
    order = (PackedRegion("perm", perm, np.int32),) if spec.quant and spec.quant.permuted else ()
    return (PackedRegion("codes", codes, np.uint8), *order)


def held_weights(
    specs: Iterable[TensorSpec], arrays: Mapping[str, DeviceArray], device: Device
) -> dict[str, PackedWeight]:
    """Return the quantised weights among `specs`, whose regions are among `arrays`, by name."""
    layouts = {spec.name: packed_layout(spec, device) for spec in specs if spec.quant is not None}
    return {
        name: PackedWeight(arrays[f"{name}.codes"], arrays.get(f"{name}.perm"), layout)
        for name, layout in layouts.items()
    }


@dataclass(frozen=True, slots=True)
class PackedScratch:
    """The buffers of products with packed weights; None where no weight of the model needs it.

    `rows` has rows that `PREPARE` writes for one product, `fed` rows that one product writes for the next. Blocks
    exchange `partials` and count them in `arrivals`, which is zero between launches. A chunk's products unpack a part
    of the weight to `unpacked`, and put the columns of their rows into the weight's order in `permuted`, or
    `permuted_inner` [T, intermediate_size]. Launches of several products count in `counter` how far their blocks are.
    In `sums` an mlp in one launch leaves what is still to be added to its row.
    """

    rows: DeviceArray | None = None
    fed: DeviceArray | None = None
    partials: DeviceArray | None = None
    arrivals: DeviceArray | None = None
    unpacked: DeviceArray | None = None
    permuted: DeviceArray | None = None
    permuted_inner: DeviceArray | None = None
    counter: DeviceArray | None = None
    sums: DeviceArray | None = None

    @classmethod
    def of(cls, arrays: Mapping[str, DeviceArray]) -> PackedScratch:
        """Return the buffers of `packed_tables` and `packed_workspace`, found by name among `arrays`."""
        return cls(**{field.name: arrays.get(f"packed_{field.name}") for field in fields(cls)})


def packed_tables(specs: Sequence[TensorSpec], device: Device) -> tuple[BufferSpec, ...]:
    """Return the buffers that live as long as the executor, zero at first: the arrival counters, which every product
    leaves at zero, and the counter that launches of several products add to."""
    counts = [plan.num_arrivals for plan in _plans(specs, device)]
    found = []
    if any(counts):
        found.append(BufferSpec("packed_arrivals", (max(counts),), EMBED, HEAD, np.int32, zeroed=True))
    if joins_products(specs, device):
        found.append(BufferSpec("packed_counter", (1,), EMBED, HEAD, np.uint64, zeroed=True))
    return tuple(found)


def packed_workspace(
    specs: Sequence[TensorSpec], config: ModelConfig, max_rows: int, device: Device
) -> Iterator[BufferSpec]:
    """Yield the buffers of a step of at most `max_rows` rows."""
    held = [spec for spec in specs if spec.quant is not None and not spec.num_experts]
    plans = list(_plans(held, device))
    for name, sizes in (
        ("packed_rows", [plan.prepared_bytes for plan in plans]),
        ("packed_partials", [plan.partial_bytes for plan in plans]),
    ):
        if any(sizes):
            yield BufferSpec(name, (max(sizes),), QKV, HEAD, np.uint8)
    if sums := num_sums([plan.layout for plan in plans], device):
        yield BufferSpec("packed_sums", (sums,), QKV, HEAD, np.float32)
    if fed := max((plan.fed_bytes for plan in plans), default=0):
        yield BufferSpec("packed_fed", (fed // 2,), GATE_UP, DOWN)
    layers = [spec for spec in held if spec.product != "head"]
    if layers:
        yield from _chunk_workspace(layers, config, max_rows, device)


def _chunk_workspace(
    layers: Sequence[TensorSpec], config: ModelConfig, max_rows: int, device: Device
) -> Iterator[BufferSpec]:
    unpacked = [spec for spec in layers if max_rows > most_chunk_rows(packed_layout(spec, device), device)]
    if unpacked:
        elements = max(slice_rows(*spec.shape) * spec.shape[1] for spec in unpacked)
        yield BufferSpec("packed_unpacked", (elements,), QKV, DOWN)
    inner = config.mlp.intermediate_size
    widths = {spec.shape[1] for spec in layers if spec.quant and spec.quant.permuted}
    if widths - {inner}:
        yield BufferSpec("packed_permuted", (max_rows * max(widths - {inner}),), QKV, GATE_UP)
    if inner in widths:
        others = {spec.shape[1] for spec in layers if not spec.name.endswith(".down")}
        first = QKV if inner in others else DOWN
        yield BufferSpec("packed_permuted_inner", (max_rows, inner), first, DOWN)


def slice_rows(num_rows: int, num_columns: int) -> int:
    """Return the rows of a weight that are unpacked at a time: equal parts, in multiples of 256."""
    most = max(UNPACKED_BYTES // 2 // num_columns // 256, 1) * 256
    parts = -(-num_rows // most)
    return min(-(-num_rows // parts // 256) * 256, num_rows)


def _plans(specs: Iterable[TensorSpec], device: Device) -> Iterator[PackedPlan]:
    """Yield the plans of all products with packed weights but experts, at every number of rows; equal layouts once."""
    weights = (
        (packed_layout(spec, device), spec.quant.permuted) for spec in specs if spec.quant and not spec.num_experts
    )
    for layout, permuted in dict.fromkeys(weights):
        yield from (_plan(layout, rows, device, permuted=permuted) for rows in ROW_BUCKETS)


@dataclass(frozen=True, eq=False, slots=True)
class Prepared:
    """Rows in the form in which packed products read them: as `PREPARE`, built with these constants, writes them."""

    rows: DeviceArray | None
    constants: PrepareConstants


class PackedProducts:
    """Launches the products with packed weights of one model; `arrays` holds the buffers of `PackedScratch` by name.

    With `prefers_shared` all of them ask for as much shared memory as a multiprocessor has, as the kernels between them
    do: a multiprocessor changes the split only while it is idle, so a block that wants another one starts late.
    """

    def __init__(
        self, launcher: Launcher, gemm: Gemm, arrays: Mapping[str, DeviceArray], device: Device,
        *, prefers_shared: bool = False,
    ):  # fmt: skip
        self._launch, self._gemm, self._device, self._prefers_shared = launcher, gemm, device, prefers_shared
        self._scratch, self._chunk = PackedScratch.of(arrays), arrays.get("chunk")
        counter = self._scratch.counter
        self.held_layers = None if counter is None else HeldLayers(launcher, device, counter)
        self.held_ffn = HeldFfn(launcher, device, self._scratch.sums)

    def step(
        self, product: StepProduct, weight: PackedWeight, after: Handoff, ahead: Weight | None = None
    ) -> Handoff:
        """Launch a product of 1 to 64 rows, fused as with a weight in 16 bits.

        `after`: the handoff of the op that has written its rows. `ahead`: the weight of the product after this one,
        which this one begins to bring to the L2. A product of one row may be held back, to be launched with the next.
        """
        prefers_shared = _plan(weight.layout, len(product.x), self._device).prefers_shared or self._prefers_shared
        launch_one, layers = partial(self._launch_one, product, weight, after, ahead), self.held_layers
        if layers is not None and layers.takes(product, weight, launch_one, prefers_shared=prefers_shared):
            return Handoff(None, prefers_shared)
        if self.held_ffn.takes(product, weight, launch_one):
            return Handoff(None, prefers_shared)
        return launch_one()

    def _launch_one(
        self, product: StepProduct, weight: PackedWeight, after: Handoff = NOTHING, ahead: Weight | None = None
    ) -> Handoff:
        scratch, (plan, x) = self._scratch, self._planned(product, weight, after.prepared)
        left = Prepared(scratch.fed, plan.fed) if plan.fed else None
        prefers_shared = plan.prefers_shared or self._prefers_shared
        exchanged = (scratch.partials, scratch.arrivals) if plan.num_arrivals else (None, None)
        more = (left.rows if left else None,) if product.kind == "gate_up" else ()
        constants, fetched = product.built(plan.constants), self._first_read(ahead, len(product.x))
        if fetched:
            constants = replace(constants, ahead=True)
        self._launch(
            LINEAR_PACKED[product.kind], constants, plan.grid, plan.block,
            *product.arguments(x, (weight.data, *exchanged), more), *fetched,
            smem=plan.shared_bytes, prefers_shared=prefers_shared,
        )  # fmt: skip
        return Handoff(left, prefers_shared)

    def _first_read(self, weight: Weight | None, num_rows: int) -> tuple[KernelArgument, ...]:
        """Return the kernel's arguments for the part of the next weight to bring to the L2; empty if there is none."""
        if not isinstance(weight, PackedWeight) or self._device.capability < FETCHING_CAPABILITY:
            return ()
        pieces = _plan(weight.layout, num_rows, self._device).first_read
        return () if pieces is None else (weight.data, *map(np.int32, pieces))

    def _planned(
        self, product: StepProduct, weight: PackedWeight, fed: Prepared | None
    ) -> tuple[PackedPlan, DeviceArray | None]:
        """Return the plan of the product, and its rows in the form that the plan reads: as the product before has
        prepared them if that fits the plan, else as they are, or prepared now."""
        x, has_norm, permuted = product.x, product.norm is not None, weight.perm is not None
        if fed is not None and not permuted:
            plan = _plan(weight.layout, len(x), self._device, has_norm=has_norm, is_fed=True)
            if plan.prepare == fed.constants:
                return plan, fed.rows
        pitch = product.row_pitch(weight.layout.in_features)
        plan = _plan(
            weight.layout, len(x), self._device, has_norm=has_norm, permuted=permuted, row_pitch=pitch,
            starts_next=product.starts_next,
        )  # fmt: skip
        if not plan.constants.prepared:
            return plan, x
        eps, rows = np.float32(product.eps), self._scratch.rows
        self._launch(PREPARE, plan.prepare, len(x), PREPARE_THREADS, rows, x, product.norm, weight.perm, eps)
        return plan, rows

    def chunk(self, y: DeviceArray, x: DeviceArray, weight: PackedWeight, *, alpha: float, beta: float) -> None:
        """Compute y = alpha x weight^T + beta y for a chunk's rows. The weight is unpacked, rounded to 16 bits: in
        registers for few rows or where no library is faster, else in memory, a part of its rows at a time."""
        if weight.perm is not None:
            x = self._gathered(x, weight.perm)
        if plan := _plan_chunk(weight.layout, len(x), self._device):
            self._in_registers(plan, y, x, weight, alpha, beta)
            return
        (num_rows, columns), unpacked = weight.shape, self._scratch.unpacked
        assert unpacked is not None, "planned without chunks"
        step, constants = slice_rows(num_rows, columns), weight.layout.repack_constants()
        for first in range(0, num_rows, step):
            count = min(step, num_rows - first)
            values = unpacked[: count * columns].reshape(count, columns)
            sizes = np.int32(first), np.int32(count), np.int32(num_rows)
            grid = min(-(-count * columns // (1024 * _BLOCK // 32)), 16 * self._device.num_sms)
            self._launch(DEQUANTIZE, constants, grid, _BLOCK, values, weight.data, *sizes)
            self._gemm(y[:, first : first + count], x, values, alpha=alpha, beta=beta, chunk=self._chunk)

    def gated_chunk(self, y: DeviceArray, x: DeviceArray, weight: PackedWeight, fatrelu: float | None) -> bool:
        """Compute y = activation(gate) * up of a chunk's rows, with the bits of both products and the activation after.

        Returns False, with nothing done, where no single kernel does that.
        """
        plan = _plan_chunk(weight.layout, len(x), self._device)
        if plan is None or not isinstance(plan.constants, GatedConstants):
            return False
        if weight.perm is not None:
            x = self._gathered(x, weight.perm)
        threshold = None if fatrelu is None else float_bits(fatrelu)
        plan = replace(plan, constants=replace(plan.constants, gated=True, fatrelu=threshold))
        self._in_registers(plan, y, x, weight, 1.0, 0.0)
        return True

    def _in_registers(
        self, plan: ChunkPlan, y: DeviceArray, x: DeviceArray, weight: PackedWeight, alpha: float, beta: float
    ) -> None:
        sizes = map(np.int32, (len(x), weight.shape[0], y.strides[0] // y.itemsize))
        factors = np.float32(alpha), np.float32(beta)
        rows = x if self._launch.is_recording else plan.rows(x)
        operands = y, rows, weight.data, self._chunk, *sizes, *factors
        self._launch(plan.kernel, plan.constants, plan.grid, plan.block, *operands, smem=plan.shared_bytes)

    def _gathered(self, x: DeviceArray, perm: DeviceArray) -> DeviceArray:
        """Return the rows with their columns in the packed order of the weight's columns."""
        (count, columns), scratch = x.shape, self._scratch
        inner, other = scratch.permuted_inner, scratch.permuted
        if inner is not None and inner.shape[1] == columns:
            out = inner[:count]
        else:
            assert other is not None, "planned without an order of columns"
            out = other[: count * columns].reshape(count, columns)
        grid = (-(-columns // (_WIDTH * _BLOCK)), count)
        self._launch(GATHER, {}, grid, _BLOCK, out, x, perm, np.int32(columns))
        return out

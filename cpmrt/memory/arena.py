"""One allocation, cut into the arrays that the plan names."""

from __future__ import annotations

from math import prod
from typing import Any

from cpmrt.memory.plan import MemoryPlan


class Arena:
    """Typed views of a flat byte array (NumPy or CuPy) at the plan's offsets."""

    def __init__(self, plan: MemoryPlan, buffer: Any):
        if buffer.nbytes < plan.total_bytes:
            raise ValueError(f"arena: {buffer.nbytes} bytes for a plan of {plan.total_bytes}")
        self.plan, self.buffer = plan, buffer

    def array(self, name: str, dtype: Any) -> Any:
        """The region `name` as an array of the planned shape. `dtype` must fill the region exactly."""
        region = self.plan.region(name)
        array = self.buffer[region.offset : region.offset + region.nbytes].view(dtype)
        if array.size != prod(region.shape):
            raise ValueError(f"arena: {name} was planned as {region.nbytes} bytes for shape {region.shape}")
        return array.reshape(region.shape)

"""One allocation, cut into the arrays that the plan names."""

from __future__ import annotations

from typing import Any

from cpmrt.memory.plan import MemoryPlan


class Arena:
    """Typed views of a flat byte array (NumPy or CuPy) at the plan's offsets."""

    def __init__(self, plan: MemoryPlan, buffer: Any):
        if buffer.nbytes < plan.total_bytes:
            raise ValueError(f"arena: {buffer.nbytes} bytes for a plan of {plan.total_bytes}")
        self.plan, self.buffer = plan, buffer

    def array(self, name: str) -> Any:
        """Return the region `name` as an array of the planned shape and type."""
        region = self.plan.region(name)
        return self.buffer[region.offset : region.offset + region.nbytes].view(region.dtype).reshape(region.shape)

    def arrays(self) -> dict[str, Any]:
        """Return every region by name."""
        return {region.name: self.array(region.name) for region in self.plan.regions}

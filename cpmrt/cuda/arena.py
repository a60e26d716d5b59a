"""The arrays of an arena: its regions, and packed weights, which may have two regions."""

from __future__ import annotations

from typing import Any

from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.linear_packed.products import held_weights
from cpmrt.memory.arena import Arena


def held_arrays(arena: Arena, device: Device) -> dict[str, Any]:
    """Return the array of every region by its name, and packed weights by the name of the weight."""
    arrays = arena.arrays()
    return arrays | held_weights(arena.plan.tensors, arrays, device)

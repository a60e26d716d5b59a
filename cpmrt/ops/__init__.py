"""The op contract: what the fast path launches, with shapes and tolerances. Both executors fit it."""

from cpmrt.ops.check import check_shapes
from cpmrt.ops.protocol import Ops, Rows
from cpmrt.ops.quantized import QuantizedWeight
from cpmrt.ops.spec import OPS, OpSpec

__all__ = ["OPS", "OpSpec", "Ops", "QuantizedWeight", "Rows", "check_shapes"]

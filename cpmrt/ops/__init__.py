"""The op contract: what the fast path launches, with shapes and tolerances. Both executors fit it."""

from cpmrt.ops.check import check_shapes
from cpmrt.ops.fp8_pages import Fp8Pages
from cpmrt.ops.protocol import Ops, Rows
from cpmrt.ops.quantized import QuantizedWeight
from cpmrt.ops.sparse import CompressedKeys, Selection
from cpmrt.ops.spec import OPS, OpSpec

__all__ = ["OPS", "CompressedKeys", "Fp8Pages", "OpSpec", "Ops", "QuantizedWeight", "Rows", "Selection", "check_shapes"]

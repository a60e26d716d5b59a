"""The op contract: what the fast path launches, with shapes and tolerances. Both executors fit it."""

from cpmrt.ops.operands import (
    NOTHING,
    SHORT_KEYS,
    BlockWeight,
    CompressedKeys,
    Fp8Pages,
    Handoff,
    KVPages,
    LatentWeights,
    LightningHeads,
    LightningState,
    MappedWeight,
    QkvWeights,
    QuantizedWeight,
    Routing,
    RowLength,
    Rows,
    Selection,
)
from cpmrt.ops.protocol import Ops
from cpmrt.ops.spec import OPS, OpSpec, check_latent_shapes, check_shapes

__all__ = [
    "NOTHING",
    "OPS",
    "SHORT_KEYS",
    "BlockWeight",
    "CompressedKeys",
    "Fp8Pages",
    "Handoff",
    "KVPages",
    "LatentWeights",
    "LightningHeads",
    "LightningState",
    "MappedWeight",
    "OpSpec",
    "Ops",
    "QkvWeights",
    "QuantizedWeight",
    "Routing",
    "RowLength",
    "Rows",
    "Selection",
    "check_latent_shapes",
    "check_shapes",
]

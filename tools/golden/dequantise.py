"""4-bit weights by the formulas of the projects that define their files, in torch and on their own: the second route.

GPTQ: `dequantize_weight` of the torch kernel of GPTQModel, whose `convert_gptq_v1_to_v2_format` adds 0x11111111 to the
words of v1 zero points. AWQ: `dequantize_gemm` of AutoAWQ. compressed-tensors: `unpack_from_int32` and `dequantize`.
Marlin: the fragments of mma.m16n8k16 in the order of IST-DASLab/marlin (`_get_perms`), as CPM.cu writes them. Formulas
written out anew. Every function gives W [N, K] in the type of the scales.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

_SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32)


def gptq(qweight: Tensor, scales: Tensor, qzeros: Tensor, g_idx: Tensor, *, v1: bool) -> Tensor:
    """qweight [K/8, N], scales [groups, N], qzeros [groups, N/8], g_idx [K]."""
    if v1:
        qzeros = (qzeros.to(torch.int64) + 0x11111111).to(torch.int32)
    zeros = ((qzeros.unsqueeze(2) >> _SHIFTS) & 15).reshape(scales.shape)
    codes = ((qweight.unsqueeze(1) >> _SHIFTS.reshape(1, 8, 1)) & 15).reshape(-1, qweight.shape[1])
    rows = g_idx.long()
    return (scales[rows] * (codes - zeros[rows]).to(scales.dtype)).T


def awq(qweight: Tensor, scales: Tensor, qzeros: Tensor) -> Tensor:
    """qweight [K, N/8], scales [groups, N], qzeros [groups, N/8]."""
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    codes, zeros = (((words.unsqueeze(2) >> _SHIFTS) & 15)[:, :, order].flatten(1) for words in (qweight, qzeros))
    size = len(codes) // len(scales)
    scales, zeros = scales.repeat_interleave(size, dim=0), zeros.repeat_interleave(size, dim=0)
    return ((codes - zeros).to(scales.dtype) * scales).T


def compressed(packed: Tensor, scale: Tensor, zero_point: Tensor | None, g_idx: Tensor | None) -> Tensor:
    """packed [N, K/8], scale [N, groups], zero_point [N/8, groups], g_idx [K]. Values and zero points are -8..7."""
    values = (((packed.unsqueeze(2) >> _SHIFTS) & 15) - 8).flatten(1)
    order = torch.arange(values.shape[1]) if g_idx is None else torch.argsort(g_idx, stable=True)
    grouped = values[:, order].unflatten(1, (scale.shape[1], -1)).to(scale.dtype)
    if zero_point is not None:
        zeros = (((zero_point.unsqueeze(1) >> _SHIFTS.reshape(1, 8, 1)) & 15) - 8).flatten(0, 1)
        grouped = grouped - zeros.unsqueeze(2).to(scale.dtype)
    return (grouped * scale.unsqueeze(2)).flatten(1)[:, torch.argsort(order)]


def marlin(qweight: Tensor, scales: Tensor) -> Tensor:
    """qweight [K/16, 2N], scales [groups, N], both in Marlin's order."""
    num_tiles, num_rows = qweight.shape[0], qweight.shape[1] // 2
    nibbles = ((qweight.unsqueeze(2) >> _SHIFTS) & 15).reshape(num_tiles, num_rows // 64, 32, 4, 8)
    codes = torch.empty(num_tiles, 16, num_rows // 64, 64, dtype=torch.int32)
    for lane in range(32):
        for nibble, place in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            # A lane of an m16n8 fragment has column lane // 4, rows 2 (lane % 4) + {0, 1, 8, 9}; two fragments a tile.
            row = 2 * (lane % 4) + (0, 1, 8, 9)[place % 4]
            for tile in range(4):
                column = 16 * tile + lane // 4 + 8 * (place // 4)
                codes[:, row, :, column] = nibbles[:, :, lane, tile, nibble]
    in_order = torch.empty_like(scales)
    width = 64 if len(scales) > 1 else 32
    runs, target = scales.reshape(len(scales), -1, width), in_order.reshape(len(scales), -1, width)
    for place in range(width):
        within = place % 8
        source = within * 8 + place // 8 if width == 64 else 2 * (place // 8) + 8 * (within // 2) + within % 2
        target[:, :, source] = runs[:, :, place]
    weights = codes.reshape(16 * num_tiles, num_rows)
    size = len(weights) // len(scales)
    return ((weights - 8).to(scales.dtype) * in_order.repeat_interleave(size, dim=0)).T

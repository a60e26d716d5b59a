"""Lets the device draw random weights, for a model that has only a config; distributed as in `weights.dummy`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.load.repack import STAGING, Destination, repack_scales, waves
from cpmrt.tensor_spec import TensorSpec
from cpmrt.weights.dummy import code_scale, distribution, weight_seed

FILL_NORMAL, FILL_WORDS = (
    KernelSpec(name, "load/fill.cu", reason="random weights in place of a checkpoint")
    for name in ("fill_normal", "fill_words")
)
_BLOCK = 256
_WORDS_PER_THREAD = 4
_BLOCKS_PER_SM = 8


def load_random(specs: Sequence[TensorSpec], to: Destination, seed: int) -> None:
    """Fill the regions of `specs`, and wait. A weight depends on `seed`, its name and its shape only."""
    for spec in specs:
        if spec.quant is None:
            mean, deviation = distribution(spec)
            _fill_normal(to, to.address(spec.name), spec.num_elements, _stream_seed(spec, seed), mean, deviation)
    for spec in specs:
        if spec.quant is not None:
            _fill_codes(spec, to, seed)
    for wave in waves(specs, to.regions[STAGING].nbytes if STAGING in to.regions else 0):
        for piece in wave:
            count = piece.num_rows * piece.num_groups
            _fill_normal(to, to.address(STAGING, piece.scales), count, np.uint64(0), code_scale(piece.spec), 0.0)
            # No zero points are staged: repacking writes 8 instead, or for blocks of GGUF minimums of the same effect.
            plain = piece if piece.row_bytes else replace(piece, source=replace(piece.source, packing=None))
            repack_scales(plain, to, to.dtype)
    to.launch.stream.synchronize()


def _fill_codes(spec: TensorSpec, to: Destination, seed: int) -> None:
    """Fill a packed weight with uniform codes, and draw the order of its columns where it has one."""
    from cupy.cuda import runtime

    assert spec.quant is not None, spec.name
    region, random = to.regions[f"{spec.name}.codes"], _stream_seed(spec, seed)
    grid, words = _BLOCKS_PER_SM * to.device.num_sms, np.int64(region.nbytes // 8)
    to.launch(FILL_WORDS, {}, grid, _BLOCK, to.address(region.name), words, random)
    if spec.quant.permuted:
        order = np.random.default_rng(int(random)).permutation(spec.shape[1]).astype(np.int32)
        target, kind = int(to.address(f"{spec.name}.perm")), runtime.memcpyHostToDevice
        runtime.memcpyAsync(target, order.ctypes.data, order.nbytes, kind, to.launch.stream.ptr)


def _fill_normal(
    to: Destination, address: np.uint64, count: int, seed: np.uint64, mean: float, deviation: float
) -> None:
    grid = min(-(-count // (_BLOCK * _WORDS_PER_THREAD)), _BLOCKS_PER_SM * to.device.num_sms)
    args = (address, np.int64(count), seed, np.float32(mean), np.float32(deviation))
    to.launch(FILL_NORMAL, {}, grid, _BLOCK, *args)


def _stream_seed(spec: TensorSpec, seed: int) -> np.uint64:
    """Return the seed of the device's random numbers for one weight."""
    low: np.uint64 = np.uint64(weight_seed(spec.name, seed) & (2**64 - 1))
    return low

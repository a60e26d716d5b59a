// The copy engine of sm_90: boxes of a matrix that a tensor map describes (cpmrt/cuda/driver/tensor_map.py).
#pragma once
#include "types.cuh"

// CUtensorMap. A kernel takes it as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

DEVICE void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Starts the copy of the map's box at (row, column) to shared memory; its bytes count at `barrier`. One thread.
DEVICE void copy_box(uint32_t shared, const TensorMap& map, int row, int column, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// Starts a copy of neighbouring bytes, a multiple of 16; they count at `barrier`, which expects them. One thread.
DEVICE void copy_bytes(uint32_t shared, const void* source, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

// Fence between a thread's ordinary stores to shared memory and reads of them by wgmma or the copy engine.
DEVICE void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies a slot's states in every layer to a snapshot or from one, or clears them.
//
//   formula   to[layer * to_stride + i] = from[layer * from_stride + i], or 0 if from is null, for i < count
//   operands  to, from float32, from may be null; strides and count in elements, multiples of 4
//   launch    grid (count / 1024 rounded up, layers), block 256; no shared memory
//   numerics  copies
//   oracle    ReferenceExecutor, steps Admit and Keep
//   source    original
//   layout    16 bytes a thread: a state is megabytes, and is copied once for a prompt
#include "copy.cuh"

extern "C" __global__ void __launch_bounds__(256)
    KERNEL(copy_state)(float* to, const float* from, int64_t to_stride, int64_t from_stride, int64_t count) {
  pdl_begin();
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x) * 4;
  if (i >= count) return;
  const uint4 words = from == nullptr ? make_uint4(0, 0, 0, 0) : load16(from + blockIdx.y * from_stride + i);
  store16(to + blockIdx.y * to_stride + i, words);
}

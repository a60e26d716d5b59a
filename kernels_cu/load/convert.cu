// Rounds weights of another floating-point type to scalar_t while they are loaded.
//
//   formula   out[i] = round(in[i]);  if scalar_t is half and a result is infinite: overflow = 1
//   operands  out (n) scalar_t; overflow (1) uint32, else left alone; in (n) float (convert_float32) or the 16-bit type
//             that scalar_t is not (convert_16bit). in and overflow may be mapped host memory. No alignment beyond that
//             of an element: a packed tensor may begin at any element of its region
//   launch    any grid, block 256, no shared memory
//   numerics  round to nearest even, subnormals kept; NaN stays NaN
//   oracle    dtypes.py from_float32(to_float32(in))
//   source    original
//   layout    one element a thread and turn: that is faster than the bus by which `in` comes
#include "types.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifdef CPMRT_BF16
using other_t = __half;
DEVICE float widen(other_t value) { return __half2float(value); }
#else
using other_t = __nv_bfloat16;
DEVICE float widen(other_t value) { return __bfloat162float(value); }
#endif
DEVICE float widen(float value) { return value; }

template <typename T>
DEVICE void convert(scalar_t* out, uint32_t* overflow, const T* in, int n) {
  pdl_begin();
  bool infinite = false;
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
    const scalar_t value = from_float(widen(in[i]));
    out[i] = value;
    infinite |= isinf(to_float(value));
  }
#ifdef CPMRT_FP16
  if (infinite) *overflow = 1;
#endif
}

extern "C" __global__ void KERNEL(convert_float32)(scalar_t* __restrict__ out, uint32_t* __restrict__ overflow,
                                                   const float* __restrict__ in, int n) {
  convert(out, overflow, in, n);
}

extern "C" __global__ void KERNEL(convert_16bit)(scalar_t* __restrict__ out, uint32_t* __restrict__ overflow,
                                                 const other_t* __restrict__ in, int n) {
  convert(out, overflow, in, n);
}

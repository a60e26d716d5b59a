// Copies rows into some columns of wider rows, and clears rows.
//
//   formula   out[t, first + c] = x[t, c]; clear: out[i] = 0
//   operands  out (T, out_columns), x (T, columns) scalar_t row-major; first, out_columns and columns are multiples of 8;
//             clear: out of 8 * count scalar_t
//   launch    copy_columns: grid ceil(T * columns / 2048); clear: grid ceil(count / 256); block 256; no shared memory
//   numerics  exact: words are copied
//   oracle    NumpyOps.copy_columns, NumpyOps.clear
//   source    original
//   layout    a thread moves 16 bytes
#include "copy.cuh"

extern "C" __global__ void __launch_bounds__(256)
    KERNEL(copy_columns)(scalar_t* __restrict__ out, const scalar_t* x, int first, int out_columns, int columns,
                         int num_rows) {
  pdl_begin();
  const int64_t item = blockIdx.x * static_cast<int64_t>(256) + threadIdx.x;
  const int vectors = columns / 8;
  const int64_t row = item / vectors;
  if (row >= num_rows) return;
  store16(out + row * out_columns + first + item % vectors * 8, load16(x + item * 8));
}

extern "C" __global__ void __launch_bounds__(256) KERNEL(clear)(scalar_t* __restrict__ out, int count) {
  pdl_begin();
  const int item = blockIdx.x * 256 + threadIdx.x;
  if (item < count) store16(out + static_cast<int64_t>(item) * 8, make_uint4(0, 0, 0, 0));
}

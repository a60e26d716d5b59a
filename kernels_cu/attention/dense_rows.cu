// dense_rows: finds the rows of a prefill chunk of sparse attention that attend to all their keys instead of choosing blocks.
//
//   formula   dense_chunk = (slot, start, number of rows with i + 1 <= dense_context, 0) for chunk = (slot, start, count), where i = start
//             .. start + count - 1 are the positions of the rows
//   operands  dense_chunk, chunk (4) int32
//   launch    grid 1, block 1
//   numerics  none
//   oracle    reference/sparse_attention.py
//   source    InfLLM-v2 (arXiv 2509.24663)
//   layout    these rows are the first ones of the chunk, so together they are a shorter chunk, which the kernels of attention over all
//             keys take. One thread, after pdl_wait, because an earlier kernel writes the chunk
#include "types.cuh"

extern "C" __global__ void KERNEL(dense_rows)(int* dense_chunk, const int* chunk, int dense_context) {
  pdl_wait();
  pdl_launch_dependents();
  const int start = chunk[1];
  dense_chunk[0] = chunk[0], dense_chunk[1] = start, dense_chunk[3] = 0;
  dense_chunk[2] = max(min(chunk[2], dense_context - start), 0);
}

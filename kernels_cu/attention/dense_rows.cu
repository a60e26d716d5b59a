// dense_rows: which rows of a prefill chunk of sparse attention look at everything.
//
//   formula   dense_chunk = (slot, start, rows of the chunk with i + 1 <= dense_context, 0) for chunk = (slot, start, count), with
//             i = start .. start + count - 1
//   operands  dense_chunk, chunk (4) int32
//   launch    grid 1, block 1
//   numerics  none
//   oracle    reference/sparse_attention.py
//   source    InfLLM-v2 (arXiv 2509.24663)
//   layout    the rows of a chunk that look at everything are its first ones: a chunk of these alone, which attention over all
//             keys takes. One thread, behind the wait for what wrote the chunk
#include "types.cuh"

extern "C" __global__ void KERNEL(dense_rows)(int* dense_chunk, const int* chunk, int dense_context) {
  pdl_wait();
  pdl_launch_dependents();
  const int start = chunk[1];
  dense_chunk[0] = chunk[0], dense_chunk[1] = start, dense_chunk[3] = 0;
  dense_chunk[2] = max(min(chunk[2], dense_context - start), 0);
}

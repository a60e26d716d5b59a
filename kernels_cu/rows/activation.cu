// The gated activation: SiLU of the gate times up, or FATReLU.
//
//   formula   out[t, f] = round(g / (1 + exp(-g)) * gate_up[t, F + f]),  g = gate_up[t, f];
//             with FATRELU (gated.cuh) round(g * gate_up[t, F + f]) if g is above that threshold, else 0
//   operands  out (T, F) scalar_t; gate_up (T, 2F) scalar_t; row-major; F = INTERMEDIATE
//   constants INTERMEDIATE: columns of the output, a multiple of 8
//             FATRELU: the threshold of FATReLU, as the bits of a float; undefined: SiLU
//   launch    grid ceil(T * F / 8 / 256), block 256, no shared memory
//   numerics  float32 with the fast exponential and reciprocal (a few units in the last place), rounded once
//   oracle    reference/ops.py gated(gate, up), rounded
//   source    arXiv 2002.05202; FATReLU arXiv 2402.13516
//   layout    16 bytes a thread: memory-bound, each element is touched once. The accurate functions would make it
//             compute-bound
#if !defined(INTERMEDIATE) || (FATRELU < 0 && defined(FATRELU))
#error "a constant is not defined, or negative"
#endif
#include "copy.cuh"
#include "gated.cuh"

static_assert(INTERMEDIATE % 8 == 0, "INTERMEDIATE must be a multiple of 8");

extern "C" __global__ void __launch_bounds__(256)
    KERNEL(silu_mul)(scalar_t* __restrict__ out, const scalar_t* gate_up, int num_rows) {
  pdl_begin();
  constexpr int kPieces = INTERMEDIATE / 8;
  const int64_t piece = blockIdx.x * static_cast<int64_t>(256) + threadIdx.x;
  const int64_t row = piece / kPieces, column = piece % kPieces * 8;
  if (row >= num_rows) return;
  const scalar_t* gate = gate_up + row * (2 * INTERMEDIATE) + column;
  const uint4 g = load16_streamed(gate), u = load16_streamed(gate + INTERMEDIATE);
  store16(out + row * INTERMEDIATE + column,
          make_uint4(gated_pair(g.x, u.x), gated_pair(g.y, u.y), gated_pair(g.z, u.z), gated_pair(g.w, u.w)));
}

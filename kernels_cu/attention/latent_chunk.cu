// rotate_heads and gather_heads: copy the queries of some heads of a prefill chunk, rotated, to where attention over these heads reads
// them, and its result back to the rows of all heads.
//
//   formula   rotate_heads: out[t, h, :] = [q[t, first_head + h, :N], rope(q[t, first_head + h, N:])], rotated by the row's position in
//             split halves; gather_heads: out[t, first_head + h, :U] = attended[t, h, :U]
//   operands  q (T, H, N + R), out of rotate_heads and attended (T, heads, N + R), out of gather_heads (T, H, U) scalar_t row-major, N =
//             NOPE_DIM, R = ROPE_DIM, U = VALUE_DIM; rope (2, max_context, R / 2) scalar_t: cos, sin; positions, slots (T) int32: the
//             position of a row of slot -1 is not read but taken as 0
//   constants NOPE_DIM: elements of a query before those that are rotated. ROPE_DIM: elements that are rotated. VALUE_DIM: elements of a
//             value. NOPE_DIM and VALUE_DIM are multiples of 8, ROPE_DIM of 16
//   launch    grid ceil(threads / 256), block 256: a thread for 8 elements, or for 8 pairs of rotated ones; no shared memory
//   numerics  float32, rounded once
//   oracle    NumpyOps.prefill_latent_attention
//   source    RoPE arXiv 2104.09864
//   layout    16 bytes a thread, neighbouring threads beside each other in a row
#if !defined(NOPE_DIM) || !defined(ROPE_DIM) || !defined(VALUE_DIM)
#error "a constant is not defined"
#endif
#include "copy.cuh"

constexpr int kThreads = 256;
constexpr int kQueryDim = NOPE_DIM + ROPE_DIM, kHalf = ROPE_DIM / 2;
constexpr int kPlain = NOPE_DIM / 8, kTurned = kHalf / 8;  // threads for a head's plain part, and for its rotated part
static_assert(NOPE_DIM % 8 == 0 && VALUE_DIM % 8 == 0 && ROPE_DIM % 16 == 0, "sizes that the kernels do not take");

// Rotates two pairs in place. `first` and `second` hold elements 2 e and 2 e + 1 of the first and the second half, `cosine` and `sine`
// those of their angles.
DEVICE void turn(uint32_t& first, uint32_t& second, uint32_t cosine, uint32_t sine) {
  const float2 a = unpack2(first), b = unpack2(second), c = unpack2(cosine), s = unpack2(sine);
  first = pack2(a.x * c.x - b.x * s.x, a.y * c.y - b.y * s.y);
  second = pack2(b.x * c.x + a.x * s.x, b.y * c.y + a.y * s.y);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(rotate_heads)(scalar_t* __restrict__ out, const scalar_t* q, const scalar_t* __restrict__ rope,
                         const int* positions, const int* slots, int num_rows, int num_heads, int first_head,
                         int all_heads, int max_context) {
  pdl_begin();
  const int index = blockIdx.x * kThreads + threadIdx.x, part = index % (kPlain + kTurned);
  const int item = index / (kPlain + kTurned), head = item % num_heads, row = item / num_heads;
  if (row >= num_rows) return;
  const scalar_t* from = q + (static_cast<int64_t>(row) * all_heads + first_head + head) * kQueryDim;
  scalar_t* to = out + static_cast<int64_t>(item) * kQueryDim;
  if (part < kPlain) {
    store16(to + part * 8, load16(from + part * 8));
    return;
  }
  const int column = NOPE_DIM + (part - kPlain) * 8;
  const int64_t angle = static_cast<int64_t>(slots[row] < 0 ? 0 : positions[row]) * kHalf + (part - kPlain) * 8;
  uint4 first = load16(from + column), second = load16(from + column + kHalf);
  const uint4 c = load16(rope + angle), s = load16(rope + static_cast<int64_t>(max_context) * kHalf + angle);
  turn(first.x, second.x, c.x, s.x), turn(first.y, second.y, c.y, s.y);
  turn(first.z, second.z, c.z, s.z), turn(first.w, second.w, c.w, s.w);
  store16(to + column, first);
  store16(to + column + kHalf, second);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(gather_heads)(scalar_t* __restrict__ out, const scalar_t* attended, int num_rows, int num_heads,
                         int first_head, int all_heads) {
  pdl_begin();
  constexpr int kParts = VALUE_DIM / 8;
  const int index = blockIdx.x * kThreads + threadIdx.x, part = index % kParts;
  const int item = index / kParts, head = item % num_heads, row = item / num_heads;
  if (row >= num_rows) return;
  scalar_t* to = out + (static_cast<int64_t>(row) * all_heads + first_head + head) * VALUE_DIM;
  store16(to + part * 8, load16(attended + static_cast<int64_t>(item) * kQueryDim + part * 8));
}

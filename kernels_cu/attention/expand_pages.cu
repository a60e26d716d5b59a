// expand_pages: expands the pages of a slot from fp8 to 16 bits, in the order of positions, for attention of a prefill
// chunk.
//
// k_out[p, head, i, :] = k_scales[page, head] * k_codes[page, head, i, :], page = block_tables[slot, p]; v likewise
//
// k_out, v_out   [pages_per_sequence, K heads, 64, D] scalar_t; pages that the chunk's last row does not see stay as they are
// k_codes        [P, K heads, 64, D] e4m3, the chunk's own keys already appended; v_codes likewise
// k_scales       [P, K heads] float32, powers of two; v_scales likewise
// block_tables   [B, pages_per_sequence] int32
// chunk          [3] int32: slot, start, count, in device memory; slot -1: nothing is stored
// constants      HEAD_DIM: elements of a head: 64, 96 or 128
// grid           (a, 2 K heads): a block takes pages x, x + a and so on; y counts the heads of keys, then those of
//                values; block 256; no shared memory
// numerics       exact: every e4m3 number times every scale is a number of both 16-bit types. Codes that were never
//                written become finite numbers too
// oracle         fp8_pages.values_of
// source         original
// layout         A page of a head is 64 D codes in a row: a thread takes 16 of them at a time. Attention of a chunk
//                reads a page again for every 64 of its rows, this kernel only once; after it the attention kernels
//                need no second way to load keys for the tensor cores
#if !defined(HEAD_DIM)
#error "a constant is not defined"
#endif
#include "copy.cuh"
#include "e4m3.cuh"

constexpr int kThreads = 256;
constexpr int kPageElements = kPageTokens * HEAD_DIM;

// Expands four codes, in order, to two words of scalar_t. `power` is power2() of the scale's exponent + kCodeShift.
DEVICE uint2 expand4(uint32_t codes, uint32_t power) {
  const uint32_t low = __byte_perm(codes, 0, 0x1404), high = __byte_perm(codes, 0, 0x3424);
  return make_uint2(times2(spread_codes(low), power), times2(spread_codes(high), power));
}

extern "C" __global__ void __launch_bounds__(kThreads)
KERNEL(expand_pages)(scalar_t* __restrict__ k_out, scalar_t* __restrict__ v_out, const uint8_t* k_codes,
                     const uint8_t* v_codes, const float* k_scales, const float* v_scales,
                     const int* __restrict__ block_tables, const int* chunk, int num_kv_heads, int pages_per_sequence) {
  pdl_begin();
  const int slot = chunk[0], num_pages = (chunk[1] + chunk[2] + kPageTokens - 1) / kPageTokens;
  if (slot < 0) return;
  const int head = blockIdx.y % num_kv_heads;
  const bool is_key = blockIdx.y < num_kv_heads;
  const uint8_t* codes = is_key ? k_codes : v_codes;
  const float* scales = is_key ? k_scales : v_scales;
  scalar_t* out = is_key ? k_out : v_out;
  for (int p = blockIdx.x; p < num_pages; p += gridDim.x) {
    const int page_id = block_tables[static_cast<int64_t>(slot) * pages_per_sequence + p];
    const int64_t page = static_cast<int64_t>(page_id) * num_kv_heads + head;
    const uint32_t power = power2(exponent_of(scales[page]) + kCodeShift);
    const uint8_t* source = codes + page * kPageElements;
    scalar_t* target = out + (static_cast<int64_t>(p) * num_kv_heads + head) * kPageElements;
    for (int i = threadIdx.x * 16; i < kPageElements; i += kThreads * 16) {
      const uint4 v = load16(source + i);
      const uint2 a = expand4(v.x, power), b = expand4(v.y, power), c = expand4(v.z, power), d = expand4(v.w, power);
      store16(target + i, make_uint4(a.x, a.y, b.x, b.y));
      store16(target + i + 8, make_uint4(c.x, c.y, d.x, d.y));
    }
  }
}

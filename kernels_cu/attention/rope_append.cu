// rope_append: rotates queries and keys out of the raw q/k/v projection of a step's rows, and stores keys and values.
//
//   formula   h = qkv[t, head] + bias[head]; q and k heads: h = h / sqrt(mean(h^2) + eps) * norm (where there is one),
//             then out[d] = h[d] cos - h[d+D/2] sin, out[d+D/2] = h[d+D/2] cos + h[d] sin of position t;
//             q[t, head] = out; k_pages, v_pages at (block_tables[slots[t]][l / 64], kv head, l % 64) = out, l = locations[t],
//             with FP8 the e4m3 code of out / scale: page_scale() of the largest magnitude of the page's first token;
//             with TREE rows are nodes of draft trees, each slot's one behind another, and codes and scales go to k_pages[t], node_scales[t] instead,
//             the page's first token being that of the node's path: node i, i the n-th set bit of tree_masks[t], is at
//             position tree_base[t] + n; node 0 is the slot's first row;
//             q_nope, nope_pages = h, at the places of q and of keys
//   operands  q (T, H*D) scalar_t; k_pages, v_pages (P, K, 64, D) scalar_t; q_nope, nope_pages like q and k_pages, or null; qkv (T, (H +
//             2K) * D) scalar_t: q, k, v heads; bias ((H + 2K) * D), q_norm, k_norm (D) scalar_t or null; rope (2, M, D/2) float32: cos,
//             sin; positions, slots (T) int32; locations (T) int32 or null: positions; block_tables (B, pages_per_sequence) int32. A row
//             with slot -1 stores q and q_nope only, as of position 0. With FP8 k_pages, v_pages are uint8, k_scales, v_scales (P, K)
//             float32: stored with a first token, else read; locations are null. With TREE too k_pages, v_pages (T, K, D) uint8,
//             k_node_scales, v_node_scales (T, K) float32, tree_masks (T) uint64, tree_base (T) int32; k_scales, v_scales are only read,
//             locations are those of nope_pages
//   constants HEAD_DIM: elements of a head: 64, 96 or 128. FP8: 1 stores codes and scales. NO_ROPE: if it is defined,
//             nothing is rotated and rope is null. TREE: if it is defined, with FP8, rows are nodes of draft trees
//   launch    grid ceil(T * (H + 2K) * LANES / 256) with LANES = 4 for D = 64, else 8; block 256; no shared memory
//   numerics  float32; squares are summed over a lane's elements in order, then over lanes; each value rounded once
//   oracle    NumpyOps.qkv after its product
//   source    arXiv 2104.09864 (split halves)
//   layout    a lane holds 8 elements of each half, so that a pair of a rotation is in one thread and every access takes 16 bytes; the
//             lanes of a head are neighbours, so its mean square is a few shuffles. Where a page's first token is a row of the same launch,
//             all rows of the page compute it again for the scale: no row waits for another
#if !defined(HEAD_DIM) || !defined(FP8)
#error "a constant is not defined"
#endif
#include "copy.cuh"
#include "e4m3.cuh"

static_assert(HEAD_DIM == 64 || HEAD_DIM == 96 || HEAD_DIM == 128, "HEAD_DIM must be 64, 96 or 128");
#if defined(TREE) && !FP8
#error "nodes have no place of their own beside pages in 16 bits"
#endif

constexpr int kHalf = HEAD_DIM / 2;
constexpr int kLanes = HEAD_DIM == 64 ? 4 : 8;

#if FP8
typedef uint8_t page_t;
#else
typedef scalar_t page_t;
#endif

// A lane's 8 elements of each half of a head.
struct Halves {
  float first[8], second[8];
};

DEVICE void load8(float (&out)[8], const scalar_t* source) {
  const uint4 v = load16(source);
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = unpack2(words[i]);
    out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
  }
}

DEVICE void load8(float (&out)[8], const float* source) {
  const float4 a = reinterpret_cast<const float4*>(source)[0], b = reinterpret_cast<const float4*>(source)[1];
  out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w, out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
}

DEVICE void store8(scalar_t* target, const float (&v)[8]) {
  store16(target, make_uint4(pack2(v[0], v[1]), pack2(v[2], v[3]), pack2(v[4], v[5]), pack2(v[6], v[7])));
}

DEVICE void store8(uint8_t* target, const float (&v)[8]) {
  uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < 8; i++) words[i / 4] |= e4m3_code(v[i]) << i % 4 * 8;
  *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
}

DEVICE Halves load_halves(const scalar_t* source) {
  Halves h;
  load8(h.first, source);
  load8(h.second, source + kHalf);
  return h;
}

// Divides a head by its root mean square and multiplies it by `weight`. All lanes of the head call it; those past its end bring zeros.
DEVICE void normalise(Halves& h, const scalar_t* weight, float eps) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) sum += h.first[i] * h.first[i] + h.second[i] * h.second[i];
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
  const float scale = 1.0f / sqrtf(sum / HEAD_DIM + eps);
  const Halves w = load_halves(weight);
#pragma unroll
  for (int i = 0; i < 8; i++) h.first[i] *= scale * w.first[i], h.second[i] *= scale * w.second[i];
}

// Rotates the lane's pairs by the angles of a position.
DEVICE void rotate(Halves& h, const float* cos_row, const float* sin_row) {
  float cosine[8], sine[8];
  load8(cosine, cos_row);
  load8(sine, sin_row);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float a = h.first[i], b = h.second[i];
    // Written with explicit roundings: a node must have the bits of the plain row, which another build of this file stores.
    h.first[i] = __fmaf_rn(a, cosine[i], -__fmul_rn(b, sine[i]));
    h.second[i] = __fmaf_rn(a, sine[i], __fmul_rn(b, cosine[i]));
  }
}

template <typename T>
DEVICE void store_halves(T* target, const Halves& h) {
  store8(target, h.first);
  store8(target + kHalf, h.second);
}

// Returns the largest magnitude of a head. All its lanes call it; those that do not work count as zero.
DEVICE float largest_of(const Halves& h, bool works) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) largest = fmaxf(largest, fmaxf(fabsf(h.first[i]), fabsf(h.second[i])));
  if (!works) largest = 0.0f;
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, distance));
  }
  return largest;
}

#ifdef TREE
// Returns the number of the set bit of `mask` that has `before` set bits below it.
DEVICE int node_of(uint64_t mask, int before) {
  for (int i = 0; i < before; i++) mask &= mask - 1;
  return __ffsll(static_cast<int64_t>(mask)) - 1;
}
#endif

// Pointers to what an earlier kernel of the step wrote are not __restrict__: else the compiler might take their loads for loads of constants
// and move them before pdl_wait. The next kernel is released only after this one's wait: decode_attention reads early what is older than this
// launch.
extern "C" __global__ void __launch_bounds__(256)
    KERNEL(rope_append)(scalar_t* __restrict__ q, page_t* __restrict__ k_pages, page_t* __restrict__ v_pages,
                        scalar_t* __restrict__ q_nope, scalar_t* __restrict__ nope_pages, const scalar_t* qkv, const scalar_t* __restrict__ bias,
                        const scalar_t* __restrict__ q_norm, const scalar_t* __restrict__ k_norm,
                        const float* __restrict__ rope, const int32_t* positions,
                        const int32_t* locations, const int32_t* slots, const int32_t* __restrict__ block_tables,
                        int num_rows, int num_heads, int num_kv_heads, int pages_per_sequence, int max_context, float eps
#if FP8
                        , float* k_scales, float* v_scales
#endif
#ifdef TREE
                        , float* k_node_scales, float* v_node_scales, const uint64_t* tree_masks, const int32_t* tree_base
#endif
) {
  pdl_wait();
  pdl_launch_dependents();
  const int all_heads = num_heads + 2 * num_kv_heads;
  const int64_t item = (blockIdx.x * static_cast<int64_t>(256) + threadIdx.x) / kLanes;
  // A warp stays whole for the shuffles: threads without work take the first row's first elements and store nothing.
  const bool in_range = item < static_cast<int64_t>(num_rows) * all_heads;
  const int row = in_range ? static_cast<int>(item / all_heads) : 0, head = in_range ? item % all_heads : 0;
  const int lane_offset = threadIdx.x % kLanes * 8;
  const bool works = in_range && lane_offset < kHalf;
  const int offset = lane_offset < kHalf ? lane_offset : 0;
  const bool is_query = head < num_heads, is_key = !is_query && head < num_heads + num_kv_heads;

  // Returns the lane's part of the head of row `of_row`, before its rotation.
  const auto head_of = [&](int of_row) {
    Halves h = load_halves(qkv + (static_cast<int64_t>(of_row) * all_heads + head) * HEAD_DIM + offset);
    if (bias) {
      const Halves b = load_halves(bias + head * HEAD_DIM + offset);
#pragma unroll
      for (int i = 0; i < 8; i++) h.first[i] += b.first[i], h.second[i] += b.second[i];
    }
    if (!q_norm) return h;
    Halves normalised = h;
    if (!works) {
#pragma unroll
      for (int i = 0; i < 8; i++) normalised.first[i] = 0.0f, normalised.second[i] = 0.0f;
    }
    normalise(normalised, (is_query ? q_norm : k_norm) + offset, eps);
    return is_query || is_key ? normalised : h;
  };
  // Rotates queries and keys as of a position; values stay as they are.
  const auto rotate_to = [&](Halves& h, int position) {
#ifdef NO_ROPE
    return;
#endif
    if (!is_query && !is_key) return;
    const float* cos_row = rope + static_cast<int64_t>(position) * kHalf + offset;
    rotate(h, cos_row, cos_row + static_cast<int64_t>(max_context) * kHalf);
  };
  Halves h = head_of(row);
  const int slot = slots[row], position = slot < 0 ? 0 : positions[row];
#if FP8
#ifdef TREE
  const int first_step = position / kPageTokens * kPageTokens - tree_base[row];
  const bool has_first = slot >= 0 && first_step >= 0;
  int first_row = -1;
  if (has_first) {
    first_row = node_of(tree_masks[row], first_step);
    for (int before = 0; slots[before] != slot; before++) first_row++;  // skip the rows of trees before this one
  }
#else
  // In a launch rows of one slot have consecutive positions.
  const int first_row = row - position % kPageTokens;
  const bool has_first = slot >= 0 && first_row >= 0 && slots[max(first_row, 0)] == slot;
#endif
  Halves first = head_of(has_first ? first_row : row);
  rotate_to(first, has_first ? position / kPageTokens * kPageTokens : position);
  const float first_scale = page_scale(largest_of(first, works));
#endif
  if (!works) return;
  if (is_query) {
    const int64_t place = (static_cast<int64_t>(row) * num_heads + head) * HEAD_DIM + offset;
    if (q_nope) store_halves(q_nope + place, h);
    rotate_to(h, position);
    store_halves(q + place, h);
    return;
  }
  if (slot < 0) return;
  const int location = locations ? locations[row] : position;
  const auto page_of_head_at = [&](int at) {
    const int page = block_tables[static_cast<int64_t>(slot) * pages_per_sequence + at / kPageTokens];
    return static_cast<int64_t>(page) * num_kv_heads + (head - num_heads) % num_kv_heads;
  };
  const int64_t page_of_head = page_of_head_at(location);
  const int64_t place = (page_of_head * kPageTokens + location % kPageTokens) * HEAD_DIM + offset;
  if (is_key && nope_pages) store_halves(nope_pages + place, h);
  rotate_to(h, position);
#if FP8
#ifdef TREE
  const int64_t scaled_page = page_of_head_at(position);  // a node's location says nothing about its page
#else
  const int64_t scaled_page = page_of_head;
#endif
  float* scale_of_page = (is_key ? k_scales : v_scales) + scaled_page;
  const float scale = has_first ? first_scale : *scale_of_page;
#ifdef TREE
  const int64_t node = static_cast<int64_t>(row) * num_kv_heads + (head - num_heads) % num_kv_heads;
  if (offset == 0) (is_key ? k_node_scales : v_node_scales)[node] = scale;
#else
  if (first_row == row && offset == 0) *scale_of_page = scale;
#endif
  const float inverse = 1.0f / scale;   // exact, as are the products with it: scales are powers of two
#pragma unroll
  for (int i = 0; i < 8; i++) h.first[i] *= inverse, h.second[i] *= inverse;
#endif
#ifdef TREE
  store_halves((is_key ? k_pages : v_pages) + node * HEAD_DIM + offset, h);
#else
  store_halves((is_key ? k_pages : v_pages) + place, h);
#endif
}

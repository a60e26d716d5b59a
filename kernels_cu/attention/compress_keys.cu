// compress_keys and compress_path: compressed keys of sparse attention. They are means of windows of keys, stored in
// the page in which the window ends.
//
//   formula   with e = positions[t], of a row of slot s, p = block_tables[s][e / 64], for every KV head:
//             k1_pages[p, head, e % 64 / 16] = mean of the keys of e - 31 .. e, if 16 divides e + 1 and e >= 31
//             k2_pages[p, head] = mean of the keys of e - 127 .. e, if 64 divides e + 1 and e >= 127
//   operands  k1_pages (P, K, 4, D), k2_pages (P, K, D), k_pages (P, K, 64, D) scalar_t, compress_path: (layers, P, ...),
//             the keys before RoPE where the config wants them; with FP8 uint8 codes, k_scales (P, K) float32, of
//             compress_path (layers, P, K);
//             positions, slots (T) int32; block_tables (B, pages_per_sequence) int32; compress_path: trees (n) DraftTree
//             instead of positions and slots. A row of slot -1 stores nothing
//   constants HEAD_DIM: elements of a head: 64, 96 or 128. FP8: 1 reads codes and scales
//   launch    compress_keys: grid (T / rows_per_block rounded up, K, 2: k1 and k2), block D / 2; compress_path: grid
//             (layers * K, 5: four windows of k1, one of k2, draft trees of the step), block D / 2; no shared memory
//   numerics  float32, summed token by token from the first, rounded once
//   oracle    reference/sparse_attention.py append_compressed
//   source    InfLLM-v2 (arXiv 2509.24663)
//   layout    a thread sums two neighbouring elements, so that the order of a sum is that of its tokens. One of 16
//             consecutive rows ends a window, so a block of a chunk takes 16 rows
#if !defined(HEAD_DIM) || !defined(FP8)
#error "a constant is not defined"
#endif
#include "draft_tree.cuh"
#include "e4m3.cuh"
#include "window_mean.cuh"

constexpr int kFine = 16, kCoarse = kPageTokens;  // tokens between windows; a window is two of these long
constexpr int kPathWindows = 4;                   // most windows of k1 that end within a path, which has at most 64 positions

#if FP8
typedef uint8_t page_t;
#else
typedef scalar_t page_t;
#endif

// The keys of one KV head in a layer, found by position through a slot's block table: of each key this thread's two
// elements.
struct Keys {
  const page_t* first;
  const int32_t* block_table;
  int64_t page_stride;
  const float* scales;  // scale of this KV head in page 0, with FP8
  int scale_stride;

  DEVICE Keys(const page_t* pages, const int32_t* table, int num_kv_heads, int kv_head, const float* k_scales = nullptr)
      : first(pages + kv_head * (kPageTokens * HEAD_DIM) + threadIdx.x * 2), block_table(table),
        page_stride(static_cast<int64_t>(num_kv_heads) * (kPageTokens * HEAD_DIM)),
        scales(FP8 ? k_scales + kv_head : nullptr), scale_stride(num_kv_heads) {}

  DEVICE uint32_t word(int position) const {
    const int page = block_table[position / kPageTokens];
    const page_t* key = first + page * page_stride + position % kPageTokens * HEAD_DIM;
#if FP8
    return expand2(*reinterpret_cast<const uint16_t*>(key), scales[static_cast<int64_t>(page) * scale_stride]);
#else
    return *reinterpret_cast<const uint32_t*>(key);
#endif
  }
};

// Stores the mean of the window that ends at position `end`, if one does, as row end % 64 / STRIDE of the KV head's
// compressed keys in the page of `end`.
template <int STRIDE>
DEVICE void compress(scalar_t* compressed_pages, const Keys& keys, int num_kv_heads, int kv_head, int end) {
  const int first = end + 1 - 2 * STRIDE;
  if ((end + 1) % STRIDE != 0 || first < 0) return;
  const uint32_t mean = window_mean<2 * STRIDE>([&](int i) { return keys.word(first + i); });
  const int64_t rows = static_cast<int64_t>(keys.block_table[end / kPageTokens]) * num_kv_heads + kv_head;
  scalar_t* row = compressed_pages + (rows * (kPageTokens / STRIDE) + end % kPageTokens / STRIDE) * HEAD_DIM;
  reinterpret_cast<uint32_t*>(row)[threadIdx.x] = mean;
}

// Pointers to what an earlier kernel of the step wrote are not __restrict__: else the compiler might take their loads
// for loads of constants and move them before pdl_wait. The next kernel may start at once: the choice of blocks reads
// early only what is older than the kernel before this one.
extern "C" __global__ void __launch_bounds__(HEAD_DIM / 2)
    KERNEL(compress_keys)(scalar_t* k1_pages, scalar_t* k2_pages, const page_t* k_pages, const int32_t* positions,
                          const int32_t* slots, const int32_t* block_tables, int num_rows, int rows_per_block,
                          int pages_per_sequence
#if FP8
                          , const float* k_scales
#endif
) {
#if !FP8
  constexpr const float* k_scales = nullptr;
#endif
  pdl_begin();
  const int num_kv_heads = gridDim.y, kv_head = blockIdx.y;
  const int begin = blockIdx.x * rows_per_block, end_row = min(begin + rows_per_block, num_rows);
  for (int row = begin; row < end_row; row++) {
    const int slot = slots[row], position = positions[row];
    if (slot < 0) continue;
    const int32_t* table = block_tables + static_cast<int64_t>(slot) * pages_per_sequence;
    const Keys keys(k_pages, table, num_kv_heads, kv_head, k_scales);
    if (blockIdx.z == 0) {
      compress<kFine>(k1_pages, keys, num_kv_heads, kv_head, position);
    } else {
      compress<kCoarse>(k2_pages, keys, num_kv_heads, kv_head, position);
    }
  }
}

// Stores the windows that end within the path that a speculative step accepted, in every layer, once its keys have
// moved. Without the bound of 8 blocks on a multiprocessor ptxas would aim at so many that it spills.
extern "C" __global__ void __launch_bounds__(HEAD_DIM / 2, 8)
    KERNEL(compress_path)(scalar_t* k1_pages, scalar_t* k2_pages, const page_t* k_pages, const DraftTree* trees,
                          const int32_t* block_tables, int num_pages, int num_kv_heads, int pages_per_sequence
#if FP8
                          , const float* k_scales
#endif
) {
#if !FP8
  constexpr const float* k_scales = nullptr;
#endif
  pdl_wait();
  pdl_launch_dependents();
  const DraftTree* tree = trees + blockIdx.z;
  const int slot = tree->slot, root = tree->position, past = root + tree->path_length;
  if (slot < 0) return;
  const bool is_coarse = blockIdx.y == kPathWindows;
  const int stride = is_coarse ? kCoarse : kFine, window = is_coarse ? 0 : blockIdx.y;
  const int end = (root / stride + 1 + window) * stride - 1;
  if (end >= past) return;
  const int layer = blockIdx.x / num_kv_heads, kv_head = blockIdx.x % num_kv_heads;
  const int64_t heads = static_cast<int64_t>(layer) * num_pages * num_kv_heads, rows = heads * HEAD_DIM;
  const int32_t* table = block_tables + static_cast<int64_t>(slot) * pages_per_sequence;
  const Keys keys(k_pages + rows * kPageTokens, table, num_kv_heads, kv_head, k_scales + heads);
  if (is_coarse) {
    compress<kCoarse>(k2_pages + rows, keys, num_kv_heads, kv_head, end);
  } else {
    compress<kFine>(k1_pages + rows * (kPageTokens / kFine), keys, num_kv_heads, kv_head, end);
  }
}

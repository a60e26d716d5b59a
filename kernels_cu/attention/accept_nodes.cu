// accept_nodes: copies the accepted path of each draft tree into pages in fp8, from the arrays that hold the codes of its nodes.
//
// codes[l, p, head, i] = nodes[l, path[j], head] and, for i = 0, scales[l, p, head] = node_scales[l, path[j], head], where position P + j,
// j = 0 .. path_length - 1, is token i of page p of the slot; keys and values alike
//
// k_codes        [layers, P, K heads, 64, D] e4m3; v_codes likewise
// k_scales       [layers, P, K heads] float32; v_scales likewise
// k_nodes        [layers, N, K heads, D] e4m3; v_nodes likewise
// k_node_scales  [layers, N, K heads] float32; v_node_scales likewise
// trees          [n] DraftTree: slot (-1: nothing is stored), position P of the root, path and its length; the nodes of tree t begin at
//                node tree_nodes * t
// block_tables   [B, pages_per_sequence] int32
// constants      HEAD_DIM: elements of a head: 64, 96 or 128
// grid           (layers * K heads, 2, n): y = 0 copies keys, y = 1 values; block 64; no shared memory
// numerics       bytes are copied
// oracle         fp8_pages.accept_nodes
// source         original
// layout         A thread copies 16 codes at a time. Nodes and pages do not overlap, so the order of copies does not matter
#if !defined(HEAD_DIM)
#error "a constant is not defined"
#endif
#include "copy.cuh"
#include "draft_tree.cuh"

constexpr int kThreads = 64;
constexpr int kChunks = HEAD_DIM / 16;  // 16-byte chunks of a head's codes

// Pointers to what an earlier kernel of the step wrote are not __restrict__, since the compiler might then move their loads before pdl_wait.
// The next kernel is released only after this one's wait, because later kernels read pages before theirs.
extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(accept_nodes)(uint8_t* k_codes, uint8_t* v_codes, float* k_scales, float* v_scales, const uint8_t* k_nodes,
                         const uint8_t* v_nodes, const float* k_node_scales, const float* v_node_scales,
                         const DraftTree* trees, const int32_t* block_tables, int num_pages, int num_nodes,
                         int num_kv_heads, int pages_per_sequence, int tree_nodes) {
  pdl_wait();
  pdl_launch_dependents();
  const DraftTree* tree = trees + blockIdx.z;
  const int slot = tree->slot, root = tree->position, length = tree->path_length;
  if (slot < 0) return;
  const bool is_value = blockIdx.y == 1;
  const int64_t layer = blockIdx.x / num_kv_heads;
  const int head = blockIdx.x % num_kv_heads;
  const int32_t* block_table = block_tables + static_cast<int64_t>(slot) * pages_per_sequence;
  uint8_t* codes = is_value ? v_codes : k_codes;
  float* scales = is_value ? v_scales : k_scales;
  const uint8_t* nodes = is_value ? v_nodes : k_nodes;
  const float* node_scales = is_value ? v_node_scales : k_node_scales;
  for (int i = threadIdx.x; i < length * kChunks; i += kThreads) {
    const int step = i / kChunks, chunk = i % kChunks, token = (root + step) % kPageTokens;
    const int64_t page = (layer * num_pages + block_table[(root + step) / kPageTokens]) * num_kv_heads + head;
    const int64_t node = (layer * num_nodes + blockIdx.z * tree_nodes + tree->path[step]) * num_kv_heads + head;
    store16(codes + (page * kPageTokens + token) * HEAD_DIM + chunk * 16, load16_written(nodes + node * HEAD_DIM + chunk * 16));
    if (token == 0 && chunk == 0) scales[page] = node_scales[node];
  }
}

// Grows a draft tree: turns the candidates of a draft pass into the rows of the next pass, and at last into the nodes to verify.
//
//   formula   score[c] = score[parent of c] + logprob[c]. tree_grow: the rows of the next pass are the top_k best of the newest
//             candidates. tree_finish: nodes 1 .. tree_size - 1 are the best of all candidates. The lower index goes first among
//             equals
//   operands  trees (n) DraftTree; token_ids, positions, slots, locations, base (T) int32 and masks (T) uint64: the rows
//             that are set up, top_k draft rows (tree_grow) or num_nodes target rows (tree_finish) of each tree; ids
//             (n * rows, top_k) int32 and logprobs (n * rows, top_k) float32: the candidates of the pass before, best first
//             in each row; hidden (n * top_k, width) scalar_t = outputs (n * rows, width)[parent row], or null
//   launch    tree_grow: grid (ceil(top_k * width / 8 / 256), at least 1, n), block 256; tree_finish: grid n, block 1024;
//             4 to 9 KB of static shared memory
//   numerics  float32 sums, compared as integers of the same order
//   oracle    reference/draft_tree.py TreeGrowth
//   source    EAGLE-2 (arXiv 2406.16858)
//   layout    a candidate's rank is the number of candidates that go before it, which a thread of its own counts in shared
//             memory: for the usual 100 to 300 candidates that is faster than sorting. Every block ranks all candidates of its
//             tree and copies its share of hidden
#include "copy.cuh"
#include "draft_tree.cuh"
#include "ordered_float.cuh"

constexpr int kGrowThreads = 256;

// Returns how many of keys[0 .. count-1] go before keys[own]: larger keys, and equal keys with a lower index. `count` is a
// multiple of 32, and so is `own` of a warp's first lane; key 0 stands for no candidate.
DEVICE int rank_of(const uint32_t* keys, int count, int own) {
  const uint32_t key = keys[own];
  const int warp_first = own & ~31;
  int rank = 0;
  for (int i = 0; i < warp_first; i += 4) {
    const uint4 v = *reinterpret_cast<const uint4*>(keys + i);
    rank += (v.x >= key) + (v.y >= key) + (v.z >= key) + (v.w >= key);
  }
  for (int i = warp_first; i < warp_first + 32; i++) rank += keys[i] > key || (keys[i] == key && i < own);
  for (int i = warp_first + 32; i < count; i += 4) {
    const uint4 v = *reinterpret_cast<const uint4*>(keys + i);
    rank += (v.x > key) + (v.y > key) + (v.z > key) + (v.w > key);
  }
  return rank;
}

// The index range of the candidates that the pass `depth` gave: `count` from index `first` on.
struct Level {
  int first, count;

  DEVICE Level(int depth, int top_k)
      : first(depth == 0 ? 0 : top_k + (depth - 1) * top_k * top_k), count(depth == 0 ? top_k : top_k * top_k) {}
};

// Returns the score of the pass's candidate `index` (counted within the pass `depth`): the cumulative log-probability of its path.
DEVICE float score_of(const DraftTree* tree, const float* logprobs, int index, int depth, int top_k) {
  const float logprob = logprobs[index];
  return depth == 0 ? logprob : __fadd_rn(tree->scores[tree->frontier[(depth - 1) * top_k + index / top_k]], logprob);
}

// Returns a key with the order of the scores. NaN goes last, and so do its children, whose scores are NaN too: else a child could
// go before its parent.
DEVICE uint32_t key_of(float score) { return score == score ? ordered(score) : 1; }

DEVICE int padded(int count) { return (count + 31) & ~31; }

// Stores the candidates of pass depth - 1 and sets up the draft's rows for pass `depth`, which is 1 or more.
extern "C" __global__ void __launch_bounds__(kGrowThreads)
    KERNEL(tree_grow)(DraftTree* trees, int32_t* __restrict__ token_ids, int32_t* __restrict__ positions,
                      int32_t* __restrict__ slots, int32_t* __restrict__ locations, uint64_t* __restrict__ masks,
                      int32_t* __restrict__ base, scalar_t* __restrict__ hidden, const scalar_t* outputs,
                      const int32_t* ids, const float* logprobs, int depth, int top_k, int position_offset, int width) {
  __shared__ __align__(16) uint32_t keys[kMaxCandidates];
  __shared__ int chosen[kMaxTopK];
  pdl_begin();
  const Level level(depth - 1, top_k);
  DraftTree* tree = trees + blockIdx.y;
  ids += blockIdx.y * level.count, logprobs += blockIdx.y * level.count;
  for (int c = threadIdx.x; c < padded(level.count); c += kGrowThreads) {
    keys[c] = 0;
    if (c >= level.count) continue;
    const float score = score_of(tree, logprobs, c, depth - 1, top_k);
    keys[c] = key_of(score);
    if (blockIdx.x == 0) {
      tree->candidate_tokens[level.first + c] = ids[c];
      tree->scores[level.first + c] = score;
    }
  }
  __syncthreads();
  for (int c = threadIdx.x; c < level.count; c += kGrowThreads) {
    const int rank = rank_of(keys, padded(level.count), c);
    if (rank < top_k) chosen[rank] = c;
  }
  __syncthreads();
  const int row = threadIdx.x;
  if (blockIdx.x == 0 && row < top_k) {
    const int c = chosen[row], before = (depth - 2) * top_k, place = (depth - 1) * top_k + row;
    const uint64_t ancestors = depth == 1 ? 0 : tree->frontier_masks[before + c / top_k];
    const uint64_t mask = ancestors | 1ull << place;
    const int first = tree->position + 1 - position_offset, position = first + depth - 1, location = first + place;
    tree->frontier[place] = level.first + c;
    tree->frontier_masks[place] = mask;
    const Rows rows = Rows{token_ids, positions, slots, locations, masks, base}.from(blockIdx.y * top_k);
    rows.set(row, slot_at(tree, location, position), ids[c], position, location, mask, first);
  }
  if (!hidden) return;
  const int chunks = width / 8, i = blockIdx.x * kGrowThreads + threadIdx.x, target = i / chunks;
  if (target >= top_k) return;
  const int column = i % chunks * 8, source = depth == 1 ? 0 : chosen[target] / top_k;
  const int first_output = blockIdx.y * (depth == 1 ? 1 : top_k);
  store16(hidden + static_cast<int64_t>(blockIdx.y * top_k + target) * width + column,
          load16_written(outputs + static_cast<int64_t>(first_output + source) * width + column));
}

// Chooses the nodes among all candidates and sets up the target's rows. `num_passes` is the number of draft passes.
extern "C" __global__ void __launch_bounds__(kMaxCandidates)
    KERNEL(tree_finish)(DraftTree* trees, int32_t* __restrict__ token_ids, int32_t* __restrict__ positions,
                        int32_t* __restrict__ slots, int32_t* __restrict__ locations, uint64_t* __restrict__ masks,
                        int32_t* __restrict__ base, const int32_t* ids, const float* logprobs, int num_passes,
                        int top_k, int tree_size, int num_nodes) {
  __shared__ __align__(16) uint32_t keys[kMaxCandidates];
  __shared__ int node_of[kMaxCandidates];
  __shared__ int chosen[kMaxNodes], parents[kMaxNodes];
  pdl_begin();
  const Level last(num_passes - 1, top_k);
  DraftTree* tree = trees + blockIdx.x;
  ids += blockIdx.x * last.count, logprobs += blockIdx.x * last.count;
  const int count = last.first + last.count, c = threadIdx.x;
  uint32_t key = 0;
  if (c < last.first) {
    key = key_of(tree->scores[c]);
  } else if (c < count) {
    key = key_of(score_of(tree, logprobs, c - last.first, num_passes - 1, top_k));
  }
  keys[c] = key;
  __syncthreads();
  if (c < count) {
    const int rank = rank_of(keys, padded(count), c);
    node_of[c] = rank + 1;
    if (rank + 1 < tree_size) chosen[rank + 1] = c;
  }
  __syncthreads();
  const int node = threadIdx.x;
  int depth = 0, token = 0;
  if (node < tree_size) {
    int parent = -1;
    if (node == 0) {
      token = tree->root_token;
    } else {
      const int own = chosen[node], behind = own - top_k, level = behind < 0 ? 0 : behind / (top_k * top_k) + 1;
      depth = level + 1;
      token = own < last.first ? tree->candidate_tokens[own] : ids[own - last.first];
      parent = level == 0 ? 0 : node_of[tree->frontier[behind / top_k]];
    }
    parents[node] = parent;
  }
  __syncthreads();
  if (node >= tree_size) return;
  uint64_t mask = 0;
  for (int ancestor = node; ancestor >= 0; ancestor = parents[ancestor]) mask |= 1ull << ancestor;
  const Rows rows = Rows{token_ids, positions, slots, locations, masks, base}.from(blockIdx.x * num_nodes);
  set_node(tree, rows, node, token, parents[node], depth, mask);
}

// Sets up the rows of a DSpark draft's block, and chooses the block's tokens one after another with a Markov head.
//
//   formula   block_begin: row r holds the newest token (r = 0) or the mask token (r > 0) at position P + r, P being the root's,
//             and sees all positions up to the last row's.
//             markov_chain: token r = token_map[arg max over the candidates u of row r of
//             logits[r][u] + second[u] . first[token r - 1]], with the root's token as token -1; the lower u wins a tie. The
//             chain ends before token r if sigmoid(confidence . [states[r] | first[token r - 1]] + bias) < min_confidence
//   operands  trees (n) DraftTree; token_ids, positions, slots, reach (n, rows) int32 and part_slots (n, rows * PARTS)
//             int32: the draft's rows; part_slots repeats a row's slot for each part of the vocabulary; node_ids,
//             node_positions, node_slots, locations, base (n, num_nodes) int32 and masks (n, num_nodes) uint64: the target's
//             rows, of which tree_size are set; logits (n, rows, VOCAB) float32; states (n, rows, hidden) scalar_t; ids
//             (n, rows * PARTS, kPartBest) int32: the best rows of the head in each part, counted from the part's first row;
//             first (tokens, RANK) and second (VOCAB, RANK) scalar_t; token_map (VOCAB) int32, or null if u is the token;
//             confidence (hidden + RANK) and bias (1) scalar_t, or null
//   constants VOCAB: rows of the draft's head. PARTS: equal parts that VOCAB is cut into, each of which gives candidates.
//             RANK: columns of the Markov head, a multiple of 8
//   launch    grid n, block 512; 4 RANK + 640 bytes of static shared memory
//   numerics  float32 sums
//   oracle    reference/draft_block.py choose_block
//   source    DSpark (DeepSpec); original
//   layout    A token's choice depends on the token before it, so one thread block chooses all tokens of a tree, and each warp
//             scores a few candidates. A warp loads its candidates' rows of `second` for the next token before the block has
//             agreed on this one. The rows for all later tokens are prefetched into the L2 at the start
#if !defined(VOCAB) || !defined(PARTS) || !defined(RANK)
#error "a constant is not defined"
#endif
#include "copy.cuh"
#include "draft_tree.cuh"
#include "ordered_float.cuh"

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kPart = VOCAB / PARTS;
constexpr int kPartBest = kPart < kMaxTopK ? kPart : kMaxTopK;
constexpr int kCandidates = PARTS * kPartBest;
constexpr int kOfWarp = (kCandidates + kWarps - 1) / kWarps;  // candidates of a warp, at most
constexpr int kLineElements = 64;  // elements in a cache line of 128 bytes
constexpr int kOfLanes = 256;      // columns that the lanes of a warp read at a time
static_assert(VOCAB % PARTS == 0 && RANK % 8 == 0, "parts are equal, and rows are read 16 bytes at a time");

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(block_begin)(const DraftTree* trees, int32_t* __restrict__ token_ids, int32_t* __restrict__ positions,
                        int32_t* __restrict__ slots, int32_t* __restrict__ reach, int32_t* __restrict__ part_slots,
                        int num_rows, int mask_token) {
  pdl_begin();
  const DraftTree* tree = trees + blockIdx.x;
  const int own = blockIdx.x * num_rows;
  token_ids += own, positions += own, slots += own, reach += own, part_slots += own * PARTS;
  const int first = tree->position, end = min(first + num_rows, min(tree->capacity, tree->max_context));
  for (int i = threadIdx.x; i < num_rows * PARTS; i += kThreads) {
    const int row = i / PARTS, position = first + row, slot = slot_at(tree, position, position);
    part_slots[i] = slot;
    if (i % PARTS != 0) continue;
    token_ids[row] = slot < 0 ? 0 : row == 0 ? tree->root_token : mask_token;
    positions[row] = slot < 0 ? 0 : position;
    slots[row] = slot;
    reach[row] = slot < 0 ? 0 : end - 1;
  }
}

DEVICE float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, distance);
  return value;
}

DEVICE uint64_t warp_max(uint64_t value) {
  const uint32_t high = static_cast<uint32_t>(value >> 32), top = __reduce_max_sync(0xFFFFFFFFu, high);
  const uint32_t low = __reduce_max_sync(0xFFFFFFFFu, high == top ? static_cast<uint32_t>(value) : 0);
  return static_cast<uint64_t>(top) << 32 | low;
}

DEVICE float dot8(uint4 row, const float* factors) {
  const uint32_t words[4] = {row.x, row.y, row.z, row.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = unpack2(words[i]);
    sum += pair.x * factors[2 * i] + pair.y * factors[2 * i + 1];
  }
  return sum;
}

// Returns the lane's part of the dot product of a row and weights of `count` columns.
DEVICE float dot_rows(const scalar_t* row, const scalar_t* weights, int count) {
  float sum = 0.0f;
  for (int column = threadIdx.x % 32 * 8; column < count; column += kOfLanes) {
    const uint4 values = load16(weights + column);
    const uint32_t words[4] = {values.x, values.y, values.z, values.w};
    float factors[8];
#pragma unroll
    for (int i = 0; i < 4; i++) factors[2 * i] = unpack2(words[i]).x, factors[2 * i + 1] = unpack2(words[i]).y;
    sum += dot8(load16_written(row + column), factors);
  }
  return sum;
}

// Returns whether the confidence is below `least`. Its logit is `of_state`, which the hidden state and the bias give, plus
// weights . context. All lanes of a warp; every warp gets the same answer.
DEVICE bool is_below(float least, float of_state, const scalar_t* weights, const float* context) {
  float sum = 0.0f;
  for (int column = threadIdx.x % 32 * 8; column < RANK; column += kOfLanes)
    sum += dot8(load16(weights + column), context + column);
  return 1.0f / (1.0f + expf(-of_state - warp_sum(sum))) < least;
}

DEVICE void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// Returns the row of the head that is candidate `index`; `row_ids` are the row's best of each part, counted from the part's first.
DEVICE int candidate_of(const int32_t* row_ids, int index) { return index / kPartBest * kPart + row_ids[index]; }

// A warp's candidates for the token of one row. Lane i holds the id and logit of the warp's i-th candidate; every lane holds its 8
// columns of each candidate's row of `second`.
struct Candidates {
  int id;
  float logit;
  uint4 rows[kOfWarp];

  DEVICE void load(const float* logits, const int32_t* row_ids, const scalar_t* second) {
    const int lane = threadIdx.x % 32, index = threadIdx.x / 32 + lane * kWarps;
    id = index < kCandidates ? candidate_of(row_ids, index) : -1;
    logit = logits[max(id, 0)];
    read(second, 0);
  }
  // Returns the warp's best candidate, as `candidate` packs it, after the token whose row of `first` is `context` (shared memory).
  // If RANK is above kOfLanes, this overwrites `rows`.
  DEVICE uint64_t best(const scalar_t* second, const float* context) {
    float scores[kOfWarp] = {};
    add(scores, context, 0);
#pragma unroll 1
    for (int begin = kOfLanes; begin < RANK; begin += kOfLanes) {
      read(second, begin);
      add(scores, context, begin);
    }
    float bias = 0.0f;
#pragma unroll
    for (int i = 0; i < kOfWarp; i++) {
      const float sum = warp_sum(scores[i]);
      if (threadIdx.x % 32 == i) bias = sum;
    }
    return warp_max(id < 0 ? 0 : candidate(logit + bias, id));
  }
  // Loads the lane's columns of the candidates' rows, from column `begin` on.
  DEVICE void read(const scalar_t* second, int begin) {
    const int column = begin + threadIdx.x % 32 * 8;
#pragma unroll
    for (int i = 0; i < kOfWarp; i++) {
      const int row = max(__shfl_sync(0xFFFFFFFFu, id, i), 0);
      if (column < RANK) rows[i] = load16(second + static_cast<int64_t>(row) * RANK + column);
    }
  }
  // Adds the products of the columns that `read` loaded to each candidate's score.
  DEVICE void add(float (&scores)[kOfWarp], const float* context, int begin) const {
    const int column = begin + threadIdx.x % 32 * 8;
    if (column >= RANK) return;
#pragma unroll
    for (int i = 0; i < kOfWarp; i++) scores[i] += dot8(rows[i], context + column);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(markov_chain)(DraftTree* trees, int32_t* __restrict__ node_ids, int32_t* __restrict__ node_positions,
                         int32_t* __restrict__ node_slots, int32_t* __restrict__ locations,
                         uint64_t* __restrict__ masks, int32_t* __restrict__ base, const float* logits,
                         const scalar_t* states, const int32_t* ids, const int32_t* slots,
                         const scalar_t* __restrict__ first, const scalar_t* __restrict__ second,
                         const int32_t* __restrict__ token_map, const scalar_t* __restrict__ confidence,
                         const scalar_t* __restrict__ bias, float min_confidence, int hidden, int num_rows,
                         int tree_size, int num_nodes) {
  __shared__ float context[RANK];
  __shared__ float of_states[kMaxNodes];
  __shared__ uint64_t best[kWarps];
  __shared__ int32_t tokens[kMaxNodes];
  pdl_begin();
  DraftTree* tree = trees + blockIdx.x;
  const int own = blockIdx.x * num_rows;
  logits += static_cast<int64_t>(own) * VOCAB, states += static_cast<int64_t>(own) * hidden;
  ids += own * kCandidates, slots += own;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Rows of padding come last, so the number of other rows, at most tree_size - 1, is the longest possible chain.
  const int length = __syncthreads_count(threadIdx.x + 1 < tree_size && slots[threadIdx.x] >= 0);
  if (confidence) {
    for (int row = warp; row < length; row += kWarps) {
      const float sum = warp_sum(dot_rows(states + static_cast<int64_t>(row) * hidden, confidence, hidden));
      if (lane == 0) of_states[row] = sum + to_float(*bias);
    }
  }
  Candidates candidates;
  const auto load = [&](int row) {
    if (row < length) candidates.load(logits + static_cast<int64_t>(row) * VOCAB, ids + row * kCandidates, second);
  };
  load(0);
#pragma unroll 1
  for (int i = kCandidates + threadIdx.x; i < length * kCandidates; i += kThreads) {
    const int row = i / kCandidates * kCandidates;
    const scalar_t* wanted = second + static_cast<int64_t>(candidate_of(ids + row, i - row)) * RANK;
#pragma unroll
    for (int column = 0; column < RANK; column += kLineElements) prefetch(wanted + column);
  }
  int previous = tree->root_token, count = 0;
  for (; count < length; count++) {
    const scalar_t* row = first + static_cast<int64_t>(previous) * RANK;
    for (int column = threadIdx.x; column < RANK; column += kThreads) context[column] = to_float(row[column]);
    __syncthreads();
    if (confidence && is_below(min_confidence, of_states[count], confidence + hidden, context)) break;
    const uint64_t best_own = candidates.best(second, context);
    load(count + 1);
    if (lane == 0) best[warp] = best_own;
    __syncthreads();
    uint64_t largest = best[0];
#pragma unroll
    for (int i = 1; i < kWarps; i++) largest = max(largest, best[i]);
    previous = token_map ? token_map[token_of(largest)] : token_of(largest);
    if (threadIdx.x == 0) tokens[count] = previous;
  }
  __syncthreads();
  const int node = threadIdx.x;
  if (node >= tree_size) return;
  const Rows rows = Rows{node_ids, node_positions, node_slots, locations, masks, base}.from(blockIdx.x * num_nodes);
  if (node == 0) {
    set_node(tree, rows, 0, tree->root_token, -1, 0, 1);
  } else if (node > count) {
    set_node(tree, rows, node, 0, -1, 0, 0);
  } else {
    set_node(tree, rows, node, tokens[node - 1], node - 1, node, ~0ull >> (63 - node));
  }
}

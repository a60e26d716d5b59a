// A DSpark draft's block: its rows, and its tokens, chosen one after another with a Markov head.
//
//   formula   block_begin: row r holds the newest token (r = 0) or the mask token at position P + r and sees all positions
//             up to the last row's; markov_chain: token r = arg max over the candidates u of row r of
//             logits[r][u] + second[u] . first[token r - 1], the root before the first; the lower id among equals;
//             before it the chain ends if sigmoid(confidence . [states[r] | first[token r - 1]] + bias) < min_confidence
//   operands  trees (n) DraftTree; token_ids, positions, slots, reach (n, rows) int32 and part_slots (n, rows * PARTS)
//             int32: the draft's rows, the last once more for each part of the vocabulary; node_ids, node_positions,
//             node_slots, locations, base (n, num_nodes) int32 and masks (n, num_nodes) uint64: the target's rows, of
//             which tree_size are set; logits (n, rows, VOCAB) float32; states (n, rows, hidden) scalar_t; ids
//             (n, rows * PARTS, kPartBest) int32: the best tokens of each part,
//             counted from its first; first and second (VOCAB, RANK) scalar_t; confidence (hidden + RANK) and bias (1)
//             scalar_t, or null
//   constants VOCAB: tokens. PARTS: equal parts of them, of which each has candidates. RANK: columns of the Markov head, a
//             multiple of 8
//   launch    block_begin: grid n, block 512; markov_chain: grid n, block 1024; under 2 KB of static shared memory
//   numerics  float32 sums
//   oracle    reference/draft_block.py choose_block
//   source    DSpark (DeepSpec); original
//   layout    The choice of a token needs the one before it, so that one block has them all and a warp a few candidates,
//             whose rows it reads together. The rows of all tokens' candidates are asked for at the start: they come into
//             the L2 while the first token is chosen
#if !defined(VOCAB) || !defined(PARTS) || !defined(RANK)
#error "a constant is not defined"
#endif
#include "copy.cuh"
#include "draft_tree.cuh"
#include "ordered_float.cuh"

constexpr int kBeginThreads = 512;
constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kPart = VOCAB / PARTS;
constexpr int kPartBest = kPart < kMaxTopK ? kPart : kMaxTopK;
constexpr int kCandidates = PARTS * kPartBest;
constexpr int kOfWarp = (kCandidates + kWarps - 1) / kWarps;
constexpr int kLineElements = 64;  // of 128 bytes
static_assert(VOCAB % PARTS == 0 && RANK % 8 == 0, "parts are equal, and rows are read 16 bytes at a time");

extern "C" __global__ void __launch_bounds__(kBeginThreads)
    KERNEL(block_begin)(const DraftTree* trees, int32_t* __restrict__ token_ids, int32_t* __restrict__ positions,
                        int32_t* __restrict__ slots, int32_t* __restrict__ reach, int32_t* __restrict__ part_slots,
                        int num_rows, int mask_token) {
  pdl_begin();
  const DraftTree* tree = trees + blockIdx.x;
  const int own = blockIdx.x * num_rows;
  token_ids += own, positions += own, slots += own, reach += own, part_slots += own * PARTS;
  const int first = tree->position, end = min(first + num_rows, min(tree->capacity, tree->max_context));
  for (int i = threadIdx.x; i < num_rows * PARTS; i += kBeginThreads) {
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

// Of the lane's columns of a row of `count` columns and of another of them.
DEVICE float dot_rows(const scalar_t* row, const scalar_t* weights, int count) {
  float sum = 0.0f;
  for (int column = threadIdx.x % 32 * 8; column < count; column += 256) {
    const uint4 values = load16(weights + column);
    const uint32_t words[4] = {values.x, values.y, values.z, values.w};
    float factors[8];
#pragma unroll
    for (int i = 0; i < 4; i++) factors[2 * i] = unpack2(words[i]).x, factors[2 * i + 1] = unpack2(words[i]).y;
    sum += dot8(load16_written(row + column), factors);
  }
  return sum;
}

DEVICE void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// The `index`-th candidate of a row.
DEVICE int candidate_of(const int32_t* ids, int row, int index) {
  const int part = index / kPartBest;
  return part * kPart + ids[(row * PARTS + part) * kPartBest + index % kPartBest];
}

struct Markov {
  const scalar_t *first, *second;
};

// The largest of this warp's candidates behind the token whose row of `first` is `context`.
DEVICE uint64_t best_of_warp(const Markov& markov, const float* logits, const int32_t* ids, int row,
                             const float* context) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int tokens[kOfWarp];
  float scores[kOfWarp];
#pragma unroll
  for (int i = 0; i < kOfWarp; i++) {
    const int index = warp + i * kWarps;
    tokens[i] = index < kCandidates ? candidate_of(ids, row, index) : -1;
    scores[i] = 0.0f;
  }
  for (int column = lane * 8; column < RANK; column += 256) {
    float factors[8];
#pragma unroll
    for (int i = 0; i < 8; i++) factors[i] = context[column + i];
    uint4 values[kOfWarp];
#pragma unroll
    for (int i = 0; i < kOfWarp; i++) {
      values[i] = load16(markov.second + static_cast<int64_t>(max(tokens[i], 0)) * RANK + column);
    }
#pragma unroll
    for (int i = 0; i < kOfWarp; i++) scores[i] += dot8(values[i], factors);
  }
  uint64_t best = 0;
#pragma unroll
  for (int i = 0; i < kOfWarp; i++) {
    const float bias = warp_sum(scores[i]);
    if (tokens[i] < 0) continue;
    const uint64_t other = candidate(logits[static_cast<int64_t>(row) * VOCAB + tokens[i]] + bias, tokens[i]);
    best = max(best, other);
  }
  return best;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(markov_chain)(DraftTree* trees, int32_t* __restrict__ node_ids, int32_t* __restrict__ node_positions,
                         int32_t* __restrict__ node_slots, int32_t* __restrict__ locations,
                         uint64_t* __restrict__ masks, int32_t* __restrict__ base, const float* logits,
                         const scalar_t* states, const int32_t* ids, const int32_t* slots,
                         const scalar_t* __restrict__ first, const scalar_t* __restrict__ second,
                         const scalar_t* __restrict__ confidence, const scalar_t* __restrict__ bias,
                         float min_confidence, int hidden, int num_rows, int tree_size, int num_nodes) {
  __shared__ float context[RANK];
  __shared__ float of_states[kMaxNodes];
  __shared__ float of_context;
  __shared__ uint64_t best[kWarps];
  __shared__ int32_t tokens[kMaxNodes];
  pdl_begin();
  DraftTree* tree = trees + blockIdx.x;
  const int own = blockIdx.x * num_rows;
  logits += static_cast<int64_t>(own) * VOCAB, states += static_cast<int64_t>(own) * hidden;
  ids += own * PARTS * kPartBest, slots += own;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, length = tree_size - 1;
  for (int i = threadIdx.x; i < length * kCandidates; i += kThreads) {
    const int row = i / kCandidates;
    if (slots[row] < 0) break;
    const scalar_t* wanted = second + static_cast<int64_t>(candidate_of(ids, row, i % kCandidates)) * RANK;
#pragma unroll
    for (int column = 0; column < RANK; column += kLineElements) prefetch(wanted + column);
  }
  if (confidence) {
    for (int row = warp; row < length; row += kWarps) {
      const float sum = warp_sum(dot_rows(states + static_cast<int64_t>(row) * hidden, confidence, hidden));
      if (lane == 0) of_states[row] = sum + to_float(*bias);
    }
  }
  const Markov markov = {first, second};
  int previous = tree->root_token, count = 0;
  for (; count < length && slots[count] >= 0; count++) {
    const scalar_t* row = first + static_cast<int64_t>(previous) * RANK;
    for (int column = threadIdx.x; column < RANK; column += kThreads) context[column] = to_float(row[column]);
    if (confidence && warp == 0) {
      const float sum = warp_sum(dot_rows(row, confidence + hidden, RANK));
      if (lane == 0) of_context = sum;
    }
    __syncthreads();
    if (confidence && 1.0f / (1.0f + expf(-of_states[count] - of_context)) < min_confidence) break;
    const uint64_t best_own = best_of_warp(markov, logits, ids, count, context);
    if (lane == 0) best[warp] = best_own;
    __syncthreads();
    uint64_t largest = best[0];
#pragma unroll
    for (int i = 1; i < kWarps; i++) largest = max(largest, best[i]);
    previous = token_of(largest);
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

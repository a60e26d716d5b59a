// Ends a speculative step: finds each tree's accepted path and updates the slot's state, history, counts, KV pages and result.
//
//   formula   The path starts at the root and goes on to the first child whose token equals the one sampled at its parent. It
//             ends where there is no such child, after a stop id, at max_new_tokens, and before a node at which no token could
//             be sampled. The step's tokens are those sampled at the path's nodes, `length` of them (with a simulated length,
//             after each node but the last the drafted token that follows it). With P the root's position:
//             words = the tokens, then the reason (kNonFinite ..) if the path ended for want of a token, then kNoToken;
//             state = the slot's state after the tokens; history[slot][P + 1 + j] = token j; token_counts += the tokens;
//             pages[P + j] = pages[P + path[j]] in every layer of every cache;
//             carry_hidden[slot][j] = hidden[path[j]], carry_counts[slot] = length
//   operands  trees (n) DraftTree; states (B) SlotState; token_counts (B, VOCAB) uint32; history (B, max_context) and
//             carry_counts (B) int32; carry_hidden (B, 64, width) and hidden (n, tree_size, width) scalar_t, or null;
//             k_pages (layers, num_pages, kv_heads, 64, head_dim) scalar_t; v_pages, nope_pages alike, or null;
//             block_tables (B, pages_per_sequence) int32; node_logprobs (n, tree_size) TokenLogprobs; results (16)
//             ResultRecord in mapped host memory; context StepContext. In the step of a small model that drafts, results
//             and token_counts are null: nothing is reported to the host, and no command is counted
//   constants VOCAB: entries of the vocabulary
//   launch    grid (1 + ceil((c * layers * kv_heads * head_dim + width) / 8 / 256), n), c caches; block 256;
//             under 1 KB of static shared memory
//   numerics  integers; keys, values and hidden are copied
//   oracle    reference/draft_tree.py accept; tests/speculation_oracle.py
//   source    original
//   layout    every block finds its tree's path by itself, from the same words in L2, so that one launch is enough. Block 0 of
//             a tree writes state and result at once, the others move the rows of keys, values and hidden states. A thread
//             moves 16 bytes of every row, the lowest row first: path[j] >= j, so no row is overwritten before it is read
#if !defined(VOCAB)
#error "a constant is not defined"
#endif
#include "copy.cuh"
#include "draft_tree.cuh"

constexpr int kThreads = 256;
constexpr int kInFlight = 4;

// The accepted path of a tree: its nodes, and the token that the step yields after each.
struct Path {
  int nodes[kMaxNodes], tokens[kMaxNodes];
  int length;
  uint32_t end;  // the reason (kNonFinite ..) if the path ended at a node without a sampled token, else kNoToken
  bool finished;
};

// The nodes that a lane of warp 0 holds: lane and lane + 32. `parent` is -2 if the tree has no such node or the slot no room for
// it (no page, or a position beyond max_context).
struct LaneNodes {
  int token[2], parent[2], depth[2];

  DEVICE LaneNodes(const DraftTree* tree, int tree_size) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int node = threadIdx.x + 32 * half;
      token[half] = 0, parent[half] = -2, depth[half] = 0;
      if (node >= tree_size) continue;
      depth[half] = tree->depths[node];
      if (slot_at(tree, tree->position + node, tree->position + depth[half]) < 0) continue;
      token[half] = tree->tokens[node];
      parent[half] = tree->parents[node];
    }
  }

  // Returns the first child of `node` with the token `sampled`, or -1. All lanes of the warp.
  DEVICE int child(int node, int sampled) const {
    const uint32_t low = __ballot_sync(0xFFFFFFFFu, parent[0] == node && token[0] == sampled);
    const uint32_t high = __ballot_sync(0xFFFFFFFFu, parent[1] == node && token[1] == sampled);
    return low ? __ffs(low) - 1 : high ? __ffs(high) + 31 : -1;
  }

  // Returns the deepest node that has room and that no mask has cut (token -1), the first among equals; 0, the root, if there is
  // none. All lanes of the warp.
  DEVICE int deepest() const {
    uint32_t best = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint32_t node = threadIdx.x + 32 * half;
      if (parent[half] >= 0 && token[half] >= 0) best = max(best, static_cast<uint32_t>(depth[half]) * kMaxNodes + kMaxNodes - 1 - node);
    }
    best = __reduce_max_sync(0xFFFFFFFFu, best);
    return best ? kMaxNodes - 1 - best % kMaxNodes : 0;
  }
};

// Returns how many tokens this step is to yield so that the steps so far yield `mean` tokens each.
DEVICE int simulated_length(const DraftTree* tree, float mean) {
  const double before = static_cast<double>(tree->num_steps - 1) * mean;
  return static_cast<int>(floor(before + mean) - floor(before));
}

// Finds the accepted path and writes it to `path` in shared memory. All of warp 0. If `simulate_accept` is > 0, the path is the one to
// the deepest node instead, cut so that the mean length of paths is `simulate_accept`. Its nodes go to `line` (shared) by depth.
DEVICE void find_path(Path& path, int* line, const DraftTree* tree, const SlotState* state, int tree_size,
                      float simulate_accept) {
  const int lane = threadIdx.x, num_left = state->max_new_tokens - tree->num_generated;
  const int num_stop_ids = state->num_stop_ids, stop_id = state->stop_ids[lane];
  const LaneNodes nodes(tree, tree_size);
  const bool is_simulated = simulate_accept > 0.0f;
  int most = kMaxNodes;
  if (is_simulated) {
    const int deepest = nodes.deepest(), depth = tree->depths[deepest];
    most = min(max(simulated_length(tree, simulate_accept), 1), depth + 1);
    if (lane == 0) {
      for (int node = deepest; node >= 0; node = tree->parents[node]) line[tree->depths[node]] = node;
    }
    __syncwarp();
  }
  int node = 0, length = 0;
  bool ends = false;
  uint32_t end = kNoToken;
  do {
    const int sampled = tree->sampled[node];
    if (sampled < 0) {
      end = static_cast<uint32_t>(sampled);
      break;
    }
    // A simulated path yields the drafted tokens: where a grammar masks the nodes, the host looks for the path among them.
    const int drafted = is_simulated && length + 1 < most ? line[length + 1] : -1;
    const int token = drafted >= 0 ? tree->tokens[drafted] : sampled;
    if (lane == 0) path.nodes[length] = node, path.tokens[length] = token;
    length++;
    ends = __any_sync(0xFFFFFFFFu, lane < num_stop_ids && stop_id == token) || length == num_left;
    node = is_simulated ? drafted : nodes.child(node, token);
  } while (!ends && node >= 0);
  if (lane == 0) path.length = length, path.finished = ends || end != kNoToken, path.end = end;
}

// Writes the slot's state, history, token and carry counts and the result of one tree. All of the tree's block 0. The first tree's
// block also counts the command in `context`. The other trees' blocks do not read `context`, which may have changed by then.
DEVICE void finish_step(const Path& path, DraftTree* tree, int index, SlotState* states, uint32_t* token_counts,
                        int32_t* history, int32_t* carry_counts, const TokenLogprobs* node_logprobs,
                        ResultRecord* results, StepContext* context, int num_words) {
  const int slot = tree->slot, length = slot < 0 ? 0 : path.length, i = threadIdx.x;
  const uint64_t sequence = tree->sequence;
  const int first_word = index * num_words;
  const bool has_logprobs = slot >= 0 && states[slot].num_logprobs > 0;
  if (has_logprobs) {
    constexpr int kWords = sizeof(TokenLogprobs) / 4;
    TokenLogprobs* out = results[(sequence - 1) % kRingEntries].logprobs + first_word;
    for (int word = i; word < length * kWords; word += kThreads) {
      const int32_t* from = reinterpret_cast<const int32_t*>(node_logprobs + path.nodes[word / kWords]);
      reinterpret_cast<int32_t*>(out)[word] = from[word % kWords];
    }
    __threadfence_system();
  }
  __syncthreads();
  if (results && i < num_words) {
    const uint32_t none = slot >= 0 && i == length ? path.end : kNoToken;
    publish(results, sequence, first_word + i, i < length ? path.tokens[i] : none, has_logprobs);
  }
  if (i < length) {
    const int token = path.tokens[i], position = tree->position + 1 + i;
    tree->path[i] = path.nodes[i];
    if (position < tree->max_context) history[static_cast<int64_t>(slot) * tree->max_context + position] = token;
    if (token_counts) {
      uint32_t* count = token_counts + static_cast<int64_t>(slot) * VOCAB + token;
      atomicAdd(count, 1u);
      atomicOr(count, kSeen);
    }
  }
  if (i != 0) return;
  if (results && index == 0) context->next_entry = context->sequence = sequence;
  tree->path_length = length;
  if (slot < 0) return;
  SlotState* state = states + slot;
  if (length > 0) state->last_token = path.tokens[length - 1];
  state->position = tree->position + length;
  state->num_generated = tree->num_generated + length;
  state->finished = path.finished;
  carry_counts[slot] = length;
}

// Copies 16 bytes from source(j) to target(j) for j = first .. length - 1, in ascending order, kInFlight loads at a time.
template <typename Source, typename Target>
DEVICE void move_rows(int first, int length, Source source, Target target) {
  for (int j = first; j < length; j += kInFlight) {
    uint4 values[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; i++) values[i] = load16_written(source(min(j + i, length - 1)));
#pragma unroll
    for (int i = 0; i < kInFlight; i++) {
      if (j + i < length) store16(target(j + i), values[i]);
    }
  }
}

// The page arrays of a slot's caches, whose rows the threads move 8 elements (one column) at a time.
struct Pages {
  scalar_t *k, *v, *nope;   // v and nope may be null
  int num_layers, num_pages, num_heads, head_dim;

  DEVICE int num_arrays() const { return 1 + (v != nullptr) + (nope != nullptr); }
  DEVICE int num_columns() const { return num_arrays() * num_layers * num_heads * (head_dim / 8); }

  // Returns the address of column `index` in the first row of page 0; `offset` is added to it.
  DEVICE scalar_t* column(int index) const {
    const int chunk = index % (head_dim / 8), rest = index / (head_dim / 8), head = rest % num_heads;
    const int array = rest / num_heads % num_arrays(), layer = rest / num_heads / num_arrays();
    const int64_t page = static_cast<int64_t>(layer) * num_pages * num_heads + head;
    return (array == 0 ? k : array == 1 ? v : nope) + page * kPageTokens * head_dim + chunk * 8;
  }

  // Returns the distance in elements from the first row of page 0 to the row of position `location`; `table` is the slot's block
  // table.
  DEVICE int64_t offset(const int32_t* table, int location) const {
    const int64_t row = static_cast<int64_t>(table[location / kPageTokens]) * num_heads * kPageTokens;
    return (row + location % kPageTokens) * head_dim;
  }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(accept)(DraftTree* trees, SlotState* states, uint32_t* token_counts, int32_t* history, int32_t* carry_counts,
                   scalar_t* __restrict__ carry_hidden, scalar_t* k_pages, scalar_t* v_pages, scalar_t* nope_pages,
                   ResultRecord* __restrict__ results, StepContext* context, const scalar_t* hidden,
                   const TokenLogprobs* node_logprobs, const int32_t* block_tables, int tree_size, int num_words,
                   int num_layers, int num_pages, int num_heads, int head_dim, int pages_per_sequence, int width,
                   float simulate_accept) {
  __shared__ Path path;
  __shared__ int line[kMaxNodes];
  pdl_begin();
  const int index = blockIdx.y;
  DraftTree* tree = trees + index;
  const int slot = tree->slot;
  // Block 0 may already have changed the slot's state, but none of its fields that find_path reads: position and num_generated
  // are taken from the tree, which holds them as they were when the step began.
  if (slot >= 0 && threadIdx.x < 32) find_path(path, line, tree, states + slot, tree_size, simulate_accept);
  __syncthreads();
  if (blockIdx.x == 0) {
    finish_step(path, tree, index, states, token_counts, history, carry_counts, node_logprobs + index * tree_size, results,
                context, num_words);
    return;
  }
  if (slot < 0) return;
  const Pages pages = {k_pages, v_pages, nope_pages, num_layers, num_pages, num_heads, head_dim};
  const int item = (blockIdx.x - 1) * kThreads + threadIdx.x, column = (item - pages.num_columns()) * 8;
  if (column < 0) {
    scalar_t* first = pages.column(item);
    const int32_t* table = block_tables + static_cast<int64_t>(slot) * pages_per_sequence;
    const int root = tree->position;
    move_rows(
        1, path.length, [&](int j) { return first + pages.offset(table, root + path.nodes[j]); },
        [&](int j) { return first + pages.offset(table, root + j); });
  } else if (carry_hidden && column < width) {
    scalar_t* kept = carry_hidden + static_cast<int64_t>(slot) * kMaxNodes * width + column;
    const scalar_t* states_of_tree = hidden + static_cast<int64_t>(index) * tree_size * width + column;
    move_rows(
        0, path.length, [&](int j) { return states_of_tree + static_cast<int64_t>(path.nodes[j]) * width; },
        [&](int j) { return kept + static_cast<int64_t>(j) * width; });
  }
}

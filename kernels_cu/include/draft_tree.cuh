// What the kernels of a speculative step leave for each other, and how they set up rows of a forward.
//
// A step has a tree for each of its sequences, one behind another. Rows of a pass lie tree by tree, as many for each; but
// for the pass over pending rows, whose row r of tree t of n is row r * n + t, so that the newest of all are neighbours.
//
// cpmrt/cuda/draft/structs.py has the struct as a NumPy dtype; a test compiles the offsets of the one against the other.
//
// What the draft has not seen of a sequence, its pending rows: row j of carry_hidden[slot] (64 at most, carry_counts[slot]
// of them) is the target's hidden state of position P - count + j, P being that of the newest token, which itself has
// none yet. It goes with the token after it, history[slot][P - count + j + 1].
#pragma once
#include "slot_state.cuh"

constexpr int kMaxCandidates = 1024;
constexpr int kMaxTopK = 32;
constexpr int kMaxTrees = 8;

// Candidate c: the first top_k are those of pass 0, then come top_k * top_k of each pass. Row i of pass d >= 1 holds
// candidate frontier[(d - 1) * top_k + i], and that bit of its mask is the row itself, the others are its ancestors.
struct alignas(16) DraftTree {
  int32_t slot;         // -1: the sequence had finished before, or there is none
  int32_t position;     // P, of the root
  int32_t root_token;
  int32_t capacity;     // positions that the slot's block table has pages for
  int32_t max_context;  // positions that there are
  int32_t num_generated;
  int32_t num_steps;    // speculative steps so far with a sequence here
  int32_t path_length;
  uint64_t sequence;  // number of the step's command
  uint64_t frontier_masks[kMaxNodes];
  int32_t frontier[kMaxNodes];
  int32_t tokens[kMaxNodes];   // of the nodes
  int32_t parents[kMaxNodes];  // -1: the root, or no node
  int32_t depths[kMaxNodes];
  int32_t sampled[kMaxNodes];
  int32_t path[kMaxNodes];
  int32_t candidate_tokens[kMaxCandidates];
  float scores[kMaxCandidates];  // cumulative log-probabilities
};

// The slot of a row at this place, -1 where there is none: such a row is padding and writes no keys.
DEVICE int slot_at(const DraftTree* tree, int location, int position) {
  return location < tree->capacity && position < tree->max_context ? tree->slot : -1;
}

// Rows of a forward. Padding is (0, 0, -1), with a mask of the row alone.
struct Rows {
  int32_t *token_ids, *positions, *slots, *locations;
  uint64_t* masks;
  int32_t* base;

  // Those from row `first` on.
  DEVICE Rows from(int first) const {
    return {token_ids + first, positions + first, slots + first, locations + first, masks + first, base + first};
  }
  DEVICE void set(int row, int slot, int token, int position, int location, uint64_t mask, int first) const {
    const bool used = slot >= 0;
    token_ids[row] = used ? token : 0;
    positions[row] = used ? position : 0;
    slots[row] = slot;
    locations[row] = used ? location : 0;
    masks[row] = used ? mask : 1;
    base[row] = used ? first : 0;
  }
};

// A node of the tree and the target's row for it. Parent -1, but for the root: there is no such node.
DEVICE void set_node(DraftTree* tree, const Rows& rows, int node, int token, int parent, int depth, uint64_t mask) {
  const int position = tree->position + depth, location = tree->position + node;
  const bool exists = node == 0 || parent >= 0;
  tree->tokens[node] = token;
  tree->parents[node] = parent;
  tree->depths[node] = depth;
  rows.set(node, exists ? slot_at(tree, location, position) : -1, token, position, location, mask, tree->position);
}

// The draft tree of a sequence, which the kernels of a speculative step hand on to each other, and the rows of a forward that they set up.
//
// A step has a tree for each of its sequences, one behind another. The rows of a pass lie tree by tree, equally many for each. Only
// in the pass over pending rows is row r of tree t (of n trees) row r * n + t: so the newest rows of all trees are neighbours.
//
// cpmrt/cuda/draft/structs.py has the struct as a NumPy dtype; a test compiles the offsets of the one against the other.
//
// The pending rows of a sequence are hidden states of the target that the draft has not seen. With count = carry_counts[slot] (64 at
// most), row j of carry_hidden[slot] is the hidden state at position P - count + j, where P is the position of the newest token,
// which has no hidden state yet. The draft reads it together with the token after it, history[slot][P - count + j + 1].
#pragma once
#include "slot_state.cuh"

constexpr int kMaxCandidates = 1024;
constexpr int kMaxTopK = 32;
constexpr int kMaxTrees = 8;

// The draft tree of one sequence. Candidates are numbered by pass: the first top_k are those of pass 0, then come top_k * top_k of each
// later pass. Row i of pass d >= 1 holds candidate frontier[(d - 1) * top_k + i]; bit (d - 1) * top_k + i of its mask is the row
// itself, the other bits are its ancestors.
struct alignas(16) DraftTree {
  int32_t slot;         // -1: the sequence had finished before the step, or the tree has no sequence
  int32_t position;     // P, the position of the root
  int32_t root_token;
  int32_t capacity;     // positions that the slot's block table has pages for
  int32_t max_context;  // the most positions that a sequence may have
  int32_t num_generated;
  int32_t num_steps;    // speculative steps so far in which the tree had a sequence
  int32_t path_length;
  uint64_t sequence;  // number of the step's command
  uint64_t frontier_masks[kMaxNodes];
  int32_t frontier[kMaxNodes];
  int32_t tokens[kMaxNodes];   // of each node, as the next three arrays
  int32_t parents[kMaxNodes];  // -1: the root, or a node that does not exist
  int32_t depths[kMaxNodes];
  int32_t sampled[kMaxNodes];
  int32_t path[kMaxNodes];
  int32_t candidate_tokens[kMaxCandidates];
  float scores[kMaxCandidates];  // cumulative log-probabilities
};

// Returns the slot of a row, or -1 for padding, which writes no keys: if the tree has no slot, the slot has no page for the row's
// location, or the row's position is not below max_context.
DEVICE int slot_at(const DraftTree* tree, int location, int position) {
  return location < tree->capacity && position < tree->max_context ? tree->slot : -1;
}

// The rows of a forward, in an array for each property. A padding row has token 0, position 0 and slot -1, and a mask of itself alone.
struct Rows {
  int32_t *token_ids, *positions, *slots, *locations;
  uint64_t* masks;
  int32_t* base;

  // Returns the rows from row `first` on.
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

// Sets a node of the tree and the target's row for it. Except for the root, parent -1 means that there is no such node: its row is padding.
DEVICE void set_node(DraftTree* tree, const Rows& rows, int node, int token, int parent, int depth, uint64_t mask) {
  const int position = tree->position + depth, location = tree->position + node;
  const bool exists = node == 0 || parent >= 0;
  tree->tokens[node] = token;
  tree->parents[node] = parent;
  tree->depths[node] = depth;
  rows.set(node, exists ? slot_at(tree, location, position) : -1, token, position, location, mask, tree->position);
}

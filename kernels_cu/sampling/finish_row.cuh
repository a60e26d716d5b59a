// The end of a row that gives its slot a token, for the kernels of sampling.cu and masked_sampling.cu; see the first of
// them.
#pragma once
#include "sampling_chain.cuh"

// What finish_row needs of the state, read before the token is known. Lane i has stop id i.
struct Ending {
  int num_stop_ids, stop_id, num_generated, max_new_tokens;

  DEVICE explicit Ending(const SlotState* state)
      : num_stop_ids(state->num_stop_ids), stop_id(state->stop_ids[threadIdx.x % kMaxStopIds]),
        num_generated(state->num_generated), max_new_tokens(state->max_new_tokens) {}
};

// Warp 0 of a row's first block: what the token changes, and the row's result.
DEVICE void finish_row(ResultRecord* results, SlotState* state, const Ending& ending, uint32_t* token_counts,
                       uint64_t sequence, int row, int token, bool has_logprobs) {
  const int lane = threadIdx.x;
  const bool stops = __any_sync(0xFFFFFFFFu, lane < ending.num_stop_ids && ending.stop_id == token);
  if (lane != 0) return;
  if (token < 0) {  // why there is none
    state->finished = true;
    publish(results, sequence, row, token, false);
    return;
  }
  const int num_generated = ending.num_generated + 1;
  state->num_generated = num_generated;
  state->last_token = token;
  state->finished = stops || num_generated == ending.max_new_tokens;
  publish(results, sequence, row, token, has_logprobs);
  // Nobody waits for the word, which may come from far.
  atomicAdd(&token_counts[token], 1u);
  atomicOr(&token_counts[token], kSeen);
}

struct SlotCounts {
  static constexpr bool kIsMasked = false;
  const uint32_t* words;

  DEVICE uint32_t of(int token) const { return words[token]; }
};

// What becomes of the token of row `blockIdx.y`, which sample_row chose: its log-probabilities and the row's end. The last exchange
// of sample_row ended with a barrier: every block has read the state, none is read from any more.
template <class Counts>
DEVICE void report_row(ResultRecord* results, Row<Counts>& row, SlotState* state, const Ending& ending, uint32_t* counts,
                       uint64_t sequence, int token, int num_logprobs) {
  if (num_logprobs > 0 && token >= 0) {
    TokenLogprobs* out = &results[(sequence - 1) % kRingEntries].logprobs[blockIdx.y];
    write_logprobs(out, row, token, num_logprobs);
  }
  if (row.block == 0 && threadIdx.x < 32) {
    finish_row(results, state, ending, counts, sequence, blockIdx.y, token, num_logprobs > 0);
  }
}

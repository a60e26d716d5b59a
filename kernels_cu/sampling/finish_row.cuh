// The end of a row whose token goes to its slot: the slot's new state and the row's result, for sampling.cu and
// masked_sampling.cu. The former's header explains them.
#pragma once
#include "sampling_chain.cuh"

// The fields of the slot's state that finish_row needs, read before the token is known. Lane i holds stop id i.
struct Ending {
  int num_stop_ids, stop_id, num_generated, max_new_tokens;

  DEVICE explicit Ending(const SlotState* state)
      : num_stop_ids(state->num_stop_ids), stop_id(state->stop_ids[threadIdx.x % kMaxStopIds]),
        num_generated(state->num_generated), max_new_tokens(state->max_new_tokens) {}
};

// Updates the slot's state and token counts for the row's token, and publishes the row's result. Warp 0 of the row's first block.
DEVICE void finish_row(ResultRecord* results, SlotState* state, const Ending& ending, uint32_t* token_counts,
                       uint64_t sequence, int row, int token, bool has_logprobs) {
  const int lane = threadIdx.x;
  const bool stops = __any_sync(0xFFFFFFFFu, lane < ending.num_stop_ids && ending.stop_id == token);
  if (lane != 0) return;
  if (token < 0) {  // no token, but the reason (kNonFinite ..)
    state->finished = true;
    publish(results, sequence, row, token, false);
    return;
  }
  const int num_generated = ending.num_generated + 1;
  state->num_generated = num_generated;
  state->last_token = token;
  state->finished = stops || num_generated == ending.max_new_tokens;
  publish(results, sequence, row, token, has_logprobs);
  // Atomic operations without a result: the thread does not wait for the word, which may have to come from memory.
  atomicAdd(&token_counts[token], 1u);
  atomicOr(&token_counts[token], kSeen);
}

// The counts of the row's slot, as sample_row asks for them; no mask.
struct SlotCounts {
  static constexpr bool kIsMasked = false;
  const uint32_t* words;

  DEVICE uint32_t of(int token) const { return words[token]; }
};

// Reports the token that sample_row chose for row `blockIdx.y`: writes its log-probabilities, then ends the row. The last exchange in
// sample_row was a barrier of the row's blocks: all of them have read the state, so it may change now, and no block's shared memory is
// read by another any more.
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

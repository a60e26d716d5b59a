// The end of a row of a step: what its token changes in the slot's state, and the result for the host.
#pragma once
#include "slot_state.cuh"

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
  const uint32_t count = token_counts[token];
  const int num_generated = ending.num_generated + 1;
  state->num_generated = num_generated;
  state->last_token = token;
  state->finished = stops || num_generated == ending.max_new_tokens;
  publish(results, sequence, row, token, has_logprobs);
  token_counts[token] = kSeen | (count + 1);
}

// The sampling chain: samples a token from each row of raw logits, updates the slot's state, and writes the row's result.
//
//   formula   z = biased and penalised logits / temperature; token = arg max of z + gumbel(seed, position, token) over the tokens
//             that survive top-k, then top-p among those, then min-p; temperature 0: arg max of the penalised logits.
//             The lowest id wins a tie. logprob = logit - max - log sum exp(logit - max), of the raw logits. A row with
//             NaN or +infinity, or nothing but -infinity, has no token: it reports kNonFinite and ends its sequence
//   operands  results (16) ResultRecord in mapped host memory; states (B) SlotState; token_counts (B, VOCAB) uint32;
//             logits (rows, VOCAB) float32; slots (rows) int32, -1: the row is passed over; context StepContext
//   constants VOCAB: entries of the vocabulary. PORTABLE: 1 leaves clusters out on sm_90 and later too
//   launch    grid (blocks of a row, rows), block 512; 8 blocks of a row, a cluster, on sm_90 and later unless PORTABLE,
//             else 1; 25 KB of static shared memory
//   numerics  float32 in the oracle's order, no contraction; probabilities are rounded to multiples of 2^-40 of the
//             largest and summed as integers. So a token depends neither on the number of blocks nor on the other rows. But
//             one whose cumulated probability lies within rounding of top_p can fall on the other side than in the oracle,
//             which sums in float64
//   oracle    reference/sampling.py sample, token_logprobs; reference/executor.py ReferenceExecutor._sample
//   source    original; radix selection over histograms
//   layout    each block of a row owns a run of its tokens and reads it again in every pass (it stays in L2: one row of 73,448
//             logits is 37 KB a block). A threshold is found digit by digit, as in a radix sort. The first digit is a number of
//             equal steps of z below the maximum, which spread the tokens evenly, as bits of the float would not; the later
//             digits are bits of the float inside one step. A digit value that only one token has ends the search, mostly the
//             first or second. An estimate of z, without a division, rules most tokens out, in each digit and in the draw
#if !defined(VOCAB) || !defined(PORTABLE)
#error "a constant is not defined"
#endif
#include "finish_row.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1) ROW_BLOCKS
    KERNEL(sample)(ResultRecord* __restrict__ results, SlotState* states, uint32_t* token_counts, const float* logits,
                   const int32_t* slots, const StepContext* context) {
  __shared__ Shared shared;
  pdl_launch_dependents();
  announce_block(shared);
  pdl_wait();
  row_wait();
  Row<SlotCounts> row;
  HeldLogits held = begin_row(row, logits);
  const int slot = slots[blockIdx.y];
  if (slot < 0) return;
  SlotState* state = states + slot;
  uint32_t* counts = token_counts + static_cast<int64_t>(slot) * VOCAB;
  row.token_counts.words = counts;
  set_request(row, state, &shared);

  const int top_k = state->top_k, num_logprobs = state->num_logprobs;
  const float top_p = state->top_p, log_min_p = state->log_min_p;
  const uint64_t sequence = context->sequence;
  const Ending ending(state);

  const int token = sample_row(row, held, top_k, top_p, log_min_p);
  report_row(results, row, state, ending, counts, sequence, token, num_logprobs);
}

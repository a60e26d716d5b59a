// The sampling chain for rows that may have masks, which the host may write while the layers still run.
//
//   formula   as sampling.cu, with z = -infinity for a token whose bit in the row's mask is 0; log-probabilities are those of
//             the raw logits
//   operands  those of sampling.cu; ready and bits as row_mask.cuh has them, in mapped host memory. A row waits for its ready
//             word, at most kPatience; after that it has no token, reports kNoMask and ends its sequence. So does a row without
//             NaN or +infinity whose logits are -infinity for all tokens that its mask allows; it reports kNothingAllowed
//   constants VOCAB: entries of the vocabulary. PORTABLE: 1 leaves clusters out on sm_90 and later too
//   launch    sample_masked as sample of sampling.cu, with 25 KB of static shared memory and the bits of a block's tokens
//   numerics  as sampling.cu
//   oracle    reference/sampling.py masked, sample
//   source    original
//   layout    one thread of a row polls the ready word and tells all blocks of the row what it has read
#if !defined(VOCAB) || !defined(PORTABLE)
#error "a constant is not defined"
#endif
#include "finish_row.cuh"
#include "row_mask.cuh"

static_assert(sizeof(Shared) + 4 * kMaskWords < 48 * 1024, "the mask of a row does not fit shared memory");

struct MaskedCounts {
  static constexpr bool kIsMasked = true;
  const uint32_t* words;
  BlockMask mask;

  DEVICE uint32_t of(int token) const { return words[token]; }
  DEVICE bool allows(int token) const { return mask.allows(token); }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) ROW_BLOCKS
    KERNEL(sample_masked)(ResultRecord* __restrict__ results, SlotState* states, uint32_t* token_counts,
                          const float* logits, const int32_t* slots, const StepContext* context, const uint64_t* ready,
                          const uint32_t* bits, int mask_rows, int mask_words) {
  __shared__ Shared shared;
  __shared__ uint32_t allowed[kMaskWords];
  __shared__ uint32_t readiness;
  pdl_launch_dependents();
  announce_block(shared);
  pdl_wait();
  row_wait();
  Row<MaskedCounts> row;
  HeldLogits held = begin_row(row, logits);
  const int slot = slots[blockIdx.y];
  if (slot < 0) return;
  SlotState* state = states + slot;
  uint32_t* counts = token_counts + static_cast<int64_t>(slot) * VOCAB;
  set_request(row, state, &shared);

  const int top_k = state->top_k, num_logprobs = state->num_logprobs;
  const float top_p = state->top_p, log_min_p = state->log_min_p;
  const uint64_t sequence = context->sequence;
  const Ending ending(state);

  const int64_t entry = static_cast<int64_t>((sequence - 1) % kRingEntries) * mask_rows + blockIdx.y;
  if (row.block == 0 && threadIdx.x == 0) {
    const uint32_t seen = await(ready + entry, sequence);
    for (int peer = 0; peer < kBlocks; peer++) store_peer(&readiness, peer, seen);
  }
  row_barrier();
  if (readiness == kLate) {
    if (row.block == 0 && threadIdx.x < 32) {
      finish_row(results, state, ending, counts, sequence, blockIdx.y, static_cast<int>(kNoMask), false);
    }
    return;
  }
  row.token_counts = {counts, copy_mask(allowed, bits + entry * mask_words, row.block, readiness, mask_words)};

  const int token = sample_row(row, held, top_k, top_p, log_min_p);
  report_row(results, row, state, ending, counts, sequence, token, num_logprobs);
}

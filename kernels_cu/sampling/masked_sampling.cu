// The sampling chain where rows may have a mask, which the host may write while the layers still run.
//
//   formula   as sampling.cu, with z = -infinity for a token whose bit in the row's mask is 0; log-probabilities are those of
//             the raw logits. count_certain: token_counts[slot][tokens[i]] += 1 for 0 < i < count; num_generated += count - 1
//   operands  those of sampling.cu; ready (16, mask_rows) uint64 and bits (16, mask_rows, mask_words) uint32 in mapped host memory, an
//             entry for each of the ring: ready = 4 n + 1 says that row r of command n may have any token, 4 n + 2 that
//             its bits are there, bit t % 32 of word t / 32 for token t. Until then the row waits, at most kPatience; then
//             it has no token, reports kNoMask and ends its sequence. chunk (4) int32: slot, start, count, is_last
//   constants VOCAB: entries of the vocabulary. PORTABLE: 1 leaves clusters out on sm_90 and later too
//   launch    sample_masked as sample of sampling.cu, with 25 KB of static shared memory and the bits of a block's tokens;
//             count_certain: grid 1, block 512
//   numerics  as sampling.cu
//   oracle    reference/sampling.py masked, sample; reference/executor.py ReferenceExecutor._fast_forward
//   source    original
//   layout    one thread of a row waits, and tells the row's other blocks what it has seen. A block copies the bits of its
//             tokens into shared memory, since the chain looks at them in every pass
#if !defined(VOCAB) || !defined(PORTABLE)
#error "a constant is not defined"
#endif
#include "commands.cuh"
#include "finish_row.cuh"

constexpr uint64_t kPatience = 10000000000ull;  // nanoseconds
constexpr int kMaskWords = (kBlockGroups * 4 + 31) / 32 + 1;  // that hold the bits of a block's tokens
static_assert(sizeof(Shared) + 4 * kMaskWords < 48 * 1024, "the mask of a row does not fit shared memory");

enum Readiness : uint32_t { kAny = 1, kMasked = 2, kLate = 3 };

struct MaskedCounts {
  static constexpr bool kIsMasked = true;
  const uint32_t* words;
  const uint32_t* bits;
  int first_token;  // of `bits`
  bool is_masked;

  DEVICE uint32_t of(int token) const { return words[token]; }
  DEVICE bool allows(int token) const {
    const int at = token - first_token;
    return !is_masked || (bits[at / 32] >> at % 32 & 1);
  }
};

DEVICE uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Waits until the host has said what the row of this command may have, and returns that.
DEVICE uint32_t await(const uint64_t* ready, uint64_t command) {
  const uint64_t begun = nanoseconds();
  while (true) {
    const uint64_t word = *reinterpret_cast<const volatile uint64_t*>(ready);
    if (word >> 2 == command) {
      __threadfence_system();  // the bits are read after it
      return word & 3;
    }
    if (nanoseconds() - begun > kPatience) return kLate;
    __nanosleep(200);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) ROW_BLOCKS
    KERNEL(sample_masked)(ResultRecord* __restrict__ results, SlotState* states, uint32_t* token_counts,
                          const float* logits, const int32_t* slots, const StepContext* context, const uint64_t* ready,
                          const uint32_t* bits, int mask_rows, int mask_words) {
  __shared__ Shared shared;
  __shared__ uint32_t allowed[kMaskWords];
  __shared__ uint32_t readiness;
  pdl_launch_dependents();
  row_arrive();  // No block writes into another's shared memory before that one runs.
  pdl_wait();
  row_wait();
  const int slot = slots[blockIdx.y];
  if (slot < 0) return;
  SlotState* state = states + slot;
  uint32_t* counts = token_counts + static_cast<int64_t>(slot) * VOCAB;
  Row<MaskedCounts> row;
  row.logits = logits + static_cast<int64_t>(blockIdx.y) * VOCAB;
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
  const int first_word = row.block * kBlockGroups * 4 / 32;
  row.token_counts = {counts, allowed, first_word * 32, readiness == kMasked};
  if (readiness == kMasked) {
    const int32_t* source = reinterpret_cast<const int32_t*>(bits + entry * mask_words);
    for (int word = threadIdx.x; word < kMaskWords && first_word + word < mask_words; word += kThreads) {
      allowed[word] = load_host(source + first_word + word);
    }
    __syncthreads();
  }

  const int token = sample_row(row, top_k, top_p, log_min_p);
  report_row(results, row, state, ending, counts, sequence, token, num_logprobs);
}

extern "C" __global__ void KERNEL(count_certain)(SlotState* states, uint32_t* token_counts, const int32_t* token_ids,
                                                 const int32_t* chunk) {
  pdl_begin();
  const int slot = chunk[0], count = chunk[2];
  uint32_t* counts = token_counts + static_cast<int64_t>(slot) * VOCAB;
  for (int i = 1 + threadIdx.x; i < count; i += blockDim.x) atomicAdd(&counts[token_ids[i]], 1u);
  if (threadIdx.x == 0) states[slot].num_generated += count - 1;
}

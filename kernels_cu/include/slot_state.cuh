// Structs that steps keep on the device or exchange with the host: state of a slot, commands, results.
//
// cpmrt/cuda/step/structs.py has the same structs as NumPy dtypes and fills and reads them; a test compiles the offsets of
// the one against the other. Commands and results are rings in page-locked host memory that the device maps.
#pragma once
#include "types.cuh"

constexpr int kMaxStopIds = 32;
constexpr int kMaxLogprobs = 20;
constexpr int kMaxLogitBias = 300;
constexpr int kRingEntries = 16;

// A word of token_counts [B, V] says how often a token was generated, in its low bits; whether it stands in the prompt or was
// generated (kSeen); and whether the request adds something to its logit (kBiased).
constexpr uint32_t kSeen = 0x80000000u;
constexpr uint32_t kBiased = 0x40000000u;

// The state of a slot: where its sequence is, and its sampling settings.
struct alignas(16) SlotState {
  uint64_t seed;
  int32_t last_token;
  int32_t position;  // of the token to be sampled next: the number of tokens before it; it also keys that token's noise
  int32_t num_generated;
  int32_t max_new_tokens;
  int32_t finished;
  int32_t top_k;      // 0: off
  float temperature;  // 0: greedy
  float top_p;        // 1: off
  float log_min_p;    // -infinity: off
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
  int32_t num_logprobs;
  int32_t num_stop_ids;
  int32_t stop_ids[kMaxStopIds];
  int32_t num_logit_biases;
  int32_t biased_ids[kMaxLogitBias];  // ascending
  float logit_biases[kMaxLogitBias];
};

// Returns what the request adds to the logit of a token, which must be among biased_ids.
DEVICE float logit_bias_of(const SlotState* state, int token) {
  int at = 0;
#pragma unroll 1
  for (int step = 256; step > 0; step /= 2) {
    if (at + step < state->num_logit_biases && state->biased_ids[at + step] <= token) at += step;
  }
  return state->logit_biases[at];
}

enum CommandKind : int32_t {
  kAdmit = 1, kPrefill = 2, kDecode = 3, kRecall = 4, kSpeculate = 5, kCatchUp = 6, kDecodeCertain = 7
};

// An entry of the command ring: this header, then the state and num_rows pages of the slot's block table (kAdmit),
// num_rows tokens (kPrefill, kRecall) or num_rows slots (kDecode, kSpeculate, kCatchUp), each with a token behind it
// (kDecodeCertain).
struct alignas(16) Command {
  int32_t kind;
  int32_t num_rows;
  int32_t slot;   // the first of the command's slots
  int32_t start;  // kPrefill: position of the first token
  int32_t is_last;
  int32_t reserved[3];
};

// The log-probability of a row's token, and the num_top largest ones with their tokens.
struct alignas(16) TokenLogprobs {
  float logprob;
  int32_t num_top;
  float top_logprobs[kMaxLogprobs];
  int32_t top_ids[kMaxLogprobs];
};

// An entry of the result ring. The upper half of a row's word is the low half of the step's sequence number; its lower half is a token id,
// kNoToken, or the reason why there is no token (kNonFinite ..). A word is stored whole, after the row's logprobs: once it has the right
// number the row is done.
struct alignas(16) ResultRecord {
  uint64_t words[kMaxRows];
  TokenLogprobs logprobs[kMaxRows];
};

// How far the device has come in the rings. Every launch that takes an entry counts next_entry up by one; sequence is
// the number of the entry taken last, from 1 on. num_passed: the passes done so far by a launch that runs its steps
// several times.
struct alignas(16) StepContext {
  uint64_t next_entry;
  uint64_t sequence;
  int32_t num_passed;
};

constexpr uint32_t kNoToken = 0xFFFFFFFFu;
// Reasons why no token could be sampled; as ints they are negative. kNonFinite: the logits hold NaN or +infinity, or nothing but
// -infinity. kNoMask: the mask of a row did not come in time. kCutNode: a drafted node was reached that the sequence's form has cut.
// kNothingAllowed: the logits of all tokens that a mask allows are -infinity.
constexpr uint32_t kNonFinite = 0xFFFFFFFEu;
constexpr uint32_t kNoMask = 0xFFFFFFFDu;
constexpr uint32_t kCutNode = 0xFFFFFFFCu;
constexpr uint32_t kNothingAllowed = 0xFFFFFFFBu;

// Writes the word of a row for the host. The fence makes the logprobs that this thread stored come before it.
DEVICE void publish(ResultRecord* results, uint64_t sequence, int row, uint32_t token, bool has_logprobs) {
  if (has_logprobs) __threadfence_system();
  volatile uint64_t* word = &results[(sequence - 1) % kRingEntries].words[row];
  *word = sequence << 32 | token;
}

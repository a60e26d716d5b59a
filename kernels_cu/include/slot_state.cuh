// What a step leaves on the device and exchanges with the host: state of a slot, commands, results.
//
// cpmrt/cuda/step/structs.py has the same structs as NumPy dtypes and fills and reads them; a test compiles the offsets of
// the one against the other. Commands and results are rings in page-locked host memory that the device maps.
#pragma once
#include "types.cuh"

constexpr int kMaxStopIds = 32;
constexpr int kMaxLogprobs = 20;
constexpr int kMaxLogitBias = 300;
constexpr int kRingEntries = 16;

// One word of token_counts [B, V]: how often a token was generated, whether it stands in the prompt or was generated,
// and whether the request adds something to its logit.
constexpr uint32_t kSeen = 0x80000000u;
constexpr uint32_t kBiased = 0x40000000u;

struct alignas(16) SlotState {
  uint64_t seed;
  int32_t last_token;
  int32_t position;  // tokens before the one to be sampled next: its position, and what keys its noise
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

// What the request adds to the logit of a token that is among biased_ids.
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
  int32_t slot;   // the first one
  int32_t start;  // kPrefill: position of the first token
  int32_t is_last;
  int32_t reserved[3];
};

struct alignas(16) TokenLogprobs {
  float logprob;
  int32_t num_top;
  float top_logprobs[kMaxLogprobs];
  int32_t top_ids[kMaxLogprobs];
};

// An entry of the result ring. A word is the low half of the step's sequence number, shifted left by 32, and a token id, kNoToken
// or why there is none (kNonFinite ..). It is stored whole, after the row's logprobs: one with the right number says that the row is done.
struct alignas(16) ResultRecord {
  uint64_t words[kMaxRows];
  TokenLogprobs logprobs[kMaxRows];
};

// How far the device has come in the rings. Every launch that takes an entry counts next_entry up by one; sequence is
// the number of the entry taken last, from 1 on. num_passed: of a launch that runs its steps several times, the passes
// that are done.
struct alignas(16) StepContext {
  uint64_t next_entry;
  uint64_t sequence;
  int32_t num_passed;
};

constexpr uint32_t kNoToken = 0xFFFFFFFFu;
// Why no token could be sampled; as ints they are negative. The logits hold NaN or +infinity, or nothing but -infinity; the
// mask of a row did not come in time; a drafted node that its form has cut was reached; the logits of all tokens that a mask
// allows are -infinity.
constexpr uint32_t kNonFinite = 0xFFFFFFFEu;
constexpr uint32_t kNoMask = 0xFFFFFFFDu;
constexpr uint32_t kCutNode = 0xFFFFFFFCu;
constexpr uint32_t kNothingAllowed = 0xFFFFFFFBu;

// What a row produced, for the host. The fence orders the logprobs that this thread stored before.
DEVICE void publish(ResultRecord* results, uint64_t sequence, int row, uint32_t token, bool has_logprobs) {
  if (has_logprobs) __threadfence_system();
  volatile uint64_t* word = &results[(sequence - 1) % kRingEntries].words[row];
  *word = sequence << 32 | token;
}

// What a step leaves on the device and exchanges with the host: state of a slot, commands, results.
//
// cpmrt/cuda/slot_state.py has the same structs as NumPy dtypes and fills and reads them; a test compiles the offsets of
// the one against the other. Commands and results are rings in page-locked host memory that the device maps.
#pragma once
#include "types.cuh"

constexpr int kMaxStopIds = 32;
constexpr int kMaxLogprobs = 20;
constexpr int kMaxRows = 64;
constexpr int kRingEntries = 16;

// One word of token_counts [B, V]: how often a token was generated, and whether it stands in the prompt or was
// generated.
constexpr uint32_t kSeen = 0x80000000u;

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
};

enum CommandKind : int32_t { kAdmit = 1, kPrefill = 2, kDecode = 3 };

// An entry of the command ring: this header, then the state (kAdmit), num_rows tokens (kPrefill) or num_rows slots
// (kDecode).
struct alignas(16) Command {
  int32_t kind;
  int32_t num_rows;
  int32_t slot;   // kAdmit, kPrefill
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

// An entry of the result ring. A word is the low half of the step's sequence number, shifted left by 32, and a token id
// or kNoToken. It is stored whole, after the row's logprobs: a word with the right number says that the row is done.
struct alignas(16) ResultRecord {
  uint64_t words[kMaxRows];
  TokenLogprobs logprobs[kMaxRows];
};

// How far the device has come in the rings. Every launch that takes an entry counts next_entry up by one; sequence is
// the number of the entry taken last, from 1 on.
struct alignas(16) StepContext {
  uint64_t next_entry;
  uint64_t sequence;
};

constexpr uint32_t kNoToken = 0xFFFFFFFFu;

// What a row produced, for the host. The fence orders the logprobs that this thread stored before.
__device__ __forceinline__ void publish(ResultRecord* results, uint64_t sequence, int row, uint32_t token,
                                        bool has_logprobs) {
  if (has_logprobs) __threadfence_system();
  volatile uint64_t* word = &results[(sequence - 1) % kRingEntries].words[row];
  *word = sequence << 32 | token;
}

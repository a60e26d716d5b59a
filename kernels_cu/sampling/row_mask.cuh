// The mask of a row, which tells what tokens it may sample. The host writes it to mapped memory, perhaps while the layers still run.
//
// ready (16, mask_rows) uint64 and bits (16, mask_rows, mask_words) uint32 have an entry for each entry of the command ring. A ready
// word 4 n + r says that the row of command n has `Readiness` r. If r is kMasked, the row's bits are there: bit t % 32 of word
// t / 32 is 1 if token t is allowed.
#pragma once
#include "commands.cuh"
#include "sampling_chain.cuh"

constexpr uint64_t kPatience = 10000000000ull;  // nanoseconds that a row waits for its mask
constexpr int kMaskWords = (kBlockGroups * 4 + 31) / 32 + 1;  // words that hold the bits of a block's tokens

// The state of a row's mask. kCut: the row is a drafted node that must not be accepted. kAny: no mask. kLate: the host has written
// nothing in time; it is never written by the host.
enum Readiness : uint32_t { kCut = 0, kAny = 1, kMasked = 2, kLate = 3 };

// The mask of a row for the tokens of one block.
struct BlockMask {
  const uint32_t* bits;
  int first_token;  // the token of bit 0 of bits[0]
  bool is_masked;

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

// Waits until the host has written the row's ready word for this command, and returns its Readiness; kLate after kPatience.
DEVICE uint32_t await(const uint64_t* ready, uint64_t command) {
  const uint64_t begun = nanoseconds();
  while (true) {
    const uint64_t word = *reinterpret_cast<const volatile uint64_t*>(ready);
    if (word >> 2 == command) {
      __threadfence_system();  // the bits must be read after the ready word
      return word & 3;
    }
    if (nanoseconds() - begun > kPatience) return kLate;
    __nanosleep(200);
  }
}

// Copies the bits of a block's tokens to `allowed` in shared memory, since every pass of the chain reads them, and returns the
// block's mask. All threads.
DEVICE BlockMask copy_mask(uint32_t* allowed, const uint32_t* bits, int block, uint32_t readiness, int mask_words) {
  const int first_word = block * kBlockGroups * 4 / 32;
  if (readiness == kMasked) {
    const int32_t* source = reinterpret_cast<const int32_t*>(bits);
    for (int word = threadIdx.x; word < kMaskWords && first_word + word < mask_words; word += kThreads) {
      allowed[word] = load_host(source + first_word + word);
    }
    __syncthreads();
  }
  return {allowed, first_word * 32, readiness == kMasked};
}

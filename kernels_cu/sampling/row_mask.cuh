// What a row may sample, as the host says in mapped memory, perhaps while the layers still run.
//
// ready (16, mask_rows) uint64 and bits (16, mask_rows, mask_words) uint32 have an entry for each of the ring: ready = 4 n + r
// is the `Readiness` r of a row of command n; if it is kMasked, bit t % 32 of word t / 32 is there for token t.
#pragma once
#include "commands.cuh"
#include "sampling_chain.cuh"

constexpr uint64_t kPatience = 10000000000ull;  // nanoseconds
constexpr int kMaskWords = (kBlockGroups * 4 + 31) / 32 + 1;  // that hold the bits of a block's tokens

// kCut: a drafted node that is not to be accepted. kLate: the host has said nothing in time.
enum Readiness : uint32_t { kCut = 0, kAny = 1, kMasked = 2, kLate = 3 };

struct BlockMask {
  const uint32_t* bits;
  int first_token;  // of `bits`
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

// A block copies the bits of its tokens into shared memory, since the chain looks at them in every pass.
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

// A barrier of all blocks of a grid, which must all run at once.
#pragma once
#include "types.cuh"

// The barrier is a counter in memory, to which every block adds one before it waits. A completed barrier has added `blocks`, so before each
// launch the counter is a multiple of `blocks`.
template <int THREADS>
struct GridBarrier {
  uint64_t* counter;
  int blocks;
  // The count, modulo 2^32, that completed the last barrier that this block waited for; only the chosen thread has it. At first it is the
  // counter rounded down to a multiple of `blocks`: since this block has not arrived, no barrier of the launch is complete by then.
  uint32_t target;

  // Whether this thread arrives and waits for the block. It is one of the last warp: the first ones have more to do meanwhile.
  DEVICE static bool is_chosen() { return threadIdx.x == THREADS - 32; }
  DEVICE GridBarrier(uint64_t* shared_counter, int num_blocks) : counter(shared_counter), blocks(num_blocks) {
    if (!is_chosen()) return;
    uint64_t before;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(before) : "l"(counter) : "memory");
    target = static_cast<uint32_t>(before / blocks * blocks);
  }
  DEVICE uint64_t read() const {
    uint64_t value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
    return value;
  }
  // Arrives for the block: all that its threads have written is visible to whoever waits. Every block calls it, whether it has anything to
  // do or not.
  DEVICE void arrive() const {
    __syncthreads();
    if (is_chosen()) asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(counter) : "memory");
  }
  // Returns when all blocks have arrived.
  DEVICE void wait() {
    if (is_chosen()) {
      target += blocks;
      while (static_cast<int>(static_cast<uint32_t>(read()) - target) < 0) {
      }
    }
    __syncthreads();
  }
};

// A barrier of all blocks of a grid, which must all run at once.
#pragma once
#include "types.cuh"

// Blocks add to a counter, and wait for it. Each barrier of a launch adds `blocks`, so before a launch it is a multiple of that.
template <int THREADS>
struct GridBarrier {
  uint64_t* counter;
  int blocks;
  uint32_t target;   // of one thread, modulo 2^32: its counter is read while this block has not arrived, so no barrier is complete meanwhile

  // The thread that arrives and waits for the others, of the last warp: the first ones have more to do meanwhile.
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
  // All that the block's threads have written is visible to whoever waits. Every block, whether it has anything to do or not.
  DEVICE void arrive() const {
    __syncthreads();
    if (is_chosen()) asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(counter) : "memory");
  }
  DEVICE void wait() {
    if (is_chosen()) {
      target += blocks;
      while (static_cast<int>(static_cast<uint32_t>(read()) - target) < 0) {
      }
    }
    __syncthreads();
  }
};

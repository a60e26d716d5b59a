// Barriers in shared memory that copies complete, and the hardware's numbered barriers for parts of a block. Below sm_90 only
// mbarrier_init, mbarrier_test, mbarrier_poll and the numbered barriers are there.
#pragma once
#include "types.cuh"

// Initialises the barrier at `barrier` (8 bytes, an address of shared_address), of which a phase completes with `arrivals` arrivals and
// all bytes that were expected. One thread calls it, before mbarrier_init_fence and a barrier of the block.
DEVICE void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers known to the copy engine.
DEVICE void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives `arrivals` times at once; with 0 it does nothing.
DEVICE void mbarrier_arrive_many(uint32_t barrier, int arrivals) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0], %1;\n}" ::"r"(barrier),
               "r"(arrivals)
               : "memory");
}

// Arrives, and makes the phase wait for `bytes` bytes of copies as well.
DEVICE void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase with this parity has completed; the hardware may wait for it a while before it answers.
DEVICE bool mbarrier_has_completed(uint32_t barrier, int parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done;
}

// Whether the phase with this parity has completed, without waiting for it.
DEVICE bool mbarrier_test(uint32_t barrier, int parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done;
}

// Does what mbarrier_wait does, on any device.
DEVICE void mbarrier_poll(uint32_t barrier, int parity) {
  while (!mbarrier_test(barrier, parity)) {
  }
}

// Waits until the barrier's phase with this parity has completed. Phases count from 0, so on a new barrier a wait for parity 1 passes at once.
DEVICE void mbarrier_wait(uint32_t barrier, int parity) {
  while (!mbarrier_has_completed(barrier, parity)) {
  }
}

// Waits at the numbered barrier `id` (1 to 15), which completes when `threads` threads have arrived or wait.
DEVICE void barrier_wait(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at the numbered barrier without waiting for it.
DEVICE void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

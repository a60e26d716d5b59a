// Barriers in shared memory that copies complete (sm_90), and the hardware's numbered barriers for parts of a block.
#pragma once
#include "types.cuh"

// A phase of the barrier at `barrier` (8 bytes, shared_address) completes with `arrivals` arrivals and all bytes that
// were expected. One thread, before mbarrier_init_fence and a barrier of the block.
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

DEVICE void mbarrier_arrive_many(uint32_t barrier, int arrivals) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0], %1;\n}" ::"r"(barrier),
               "r"(arrivals)
               : "memory");
}

// Arrives, and lets the phase wait for `bytes` of copies as well.
DEVICE void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE bool mbarrier_has_completed(uint32_t barrier, int parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done;
}

// Whether the phase has completed, without waiting for it.
DEVICE bool mbarrier_test(uint32_t barrier, int parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done;
}

// Until the phase of this parity has completed: phases count from 0; parity 1 passes on a new barrier.
DEVICE void mbarrier_wait(uint32_t barrier, int parity) {
  while (!mbarrier_has_completed(barrier, parity)) {
  }
}

// Barrier `id` (1 to 15) completes when `threads` threads have arrived or wait.
DEVICE void barrier_wait(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

DEVICE void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

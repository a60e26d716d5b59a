// Copies of 16 bytes: plain and streamed global loads, stores, and cp.async to shared memory (sm_80 and later).
#pragma once
#include "types.cuh"

// What is read once (weights): through the read-only path, not kept in L1. `source` is 16-byte aligned, and no
// running kernel writes it.
DEVICE uint4 load16_streamed(const void* source) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source));
  return v;
}

DEVICE uint4 load16(const void* source) { return *static_cast<const uint4*>(source); }

// What the kernel before this one wrote: never above pdl_wait, whatever the compiler thinks of the pointer.
DEVICE uint4 load16_written(const void* source) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source)
               : "memory");
  return v;
}

// Past the L1, which may hold what was there before the kernel that wrote it.
DEVICE uint4 load16_past_l1(const void* source) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source)
               : "memory");
  return v;
}

DEVICE void store16(void* target, uint4 v) { *static_cast<uint4*>(target) = v; }

// The address of shared memory as cp.async, ldmatrix and mbarrier instructions take it.
DEVICE uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// Starts a copy of 16 bytes to shared memory past L1. The bytes from `source_bytes` on (0 to 16) become zero and are
// not read.
DEVICE void cp_async16(uint32_t shared, const void* source, int source_bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(source), "r"(source_bytes)
               : "memory");
}

DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all of the thread's copies are there, committed or not.
DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Until at most `PENDING` of the thread's committed groups are in flight; other threads need a barrier as well.
template <int PENDING>
DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Global loads and stores of 16 bytes, shared memory by address, and cp.async from global to shared memory (sm_80 and later).
#pragma once
#include "types.cuh"

// Loads 16 bytes that are read once (weights): through the read-only path, not kept in L1. `source` is 16-byte aligned, and no
// running kernel writes it.
DEVICE uint4 load16_streamed(const void* source) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source));
  return v;
}

// Loads at this place in the program, past the L1. The compiler would move an ordinary load to its first use, which may lie behind
// pdl_wait or behind the use of another load.
DEVICE int load_now(const int* source) {
  int v;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(source) : "memory");
  return v;
}
DEVICE float load_now(const float* source) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(source) : "memory");
  return v;
}
DEVICE float2 load_now(const float2* source) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(source) : "memory");
  return v;
}
DEVICE float4 load_now(const float4* source) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(source) : "memory");
  return v;
}
DEVICE scalar_t load_now(const scalar_t* source) {
  unsigned short v;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(source) : "memory");
  return reinterpret_cast<const scalar_t&>(v);
}

DEVICE uint4 load16(const void* source) { return *static_cast<const uint4*>(source); }

// Loads 16 bytes that the kernel before this one wrote: never above pdl_wait, whatever the compiler assumes about the pointer.
DEVICE uint4 load16_written(const void* source) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source)
               : "memory");
  return v;
}

// Loads 16 bytes past the L1, which may still hold what lay there before another kernel wrote them.
DEVICE uint4 load16_past_l1(const void* source) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source)
               : "memory");
  return v;
}

// Returns v as it is, but unknown to the compiler, which would otherwise unpack it to floats before a loop: these take twice the
// registers.
DEVICE uint4 packed(uint4 v) {
  asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
  return v;
}

DEVICE void store16(void* target, uint4 v) { *static_cast<uint4*>(target) = v; }

// Returns the address of shared memory as cp.async, ldmatrix and mbarrier instructions take it.
DEVICE uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// Loads and stores of shared memory by address, which the compiler keeps in the order of the program.
DEVICE uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
DEVICE void store_shared(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
DEVICE uint32_t load_shared_word(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
DEVICE uint2 load_shared_words(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}
DEVICE void store_shared_word(uint32_t address, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}
DEVICE void store_shared_element(uint32_t address, scalar_t v) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(reinterpret_cast<const unsigned short&>(v)) : "memory");
}
DEVICE void store_shared_words(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}
DEVICE void store_shared_float(uint32_t address, float a) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(a) : "memory");
}
DEVICE float load_shared_float(uint32_t address) { return __uint_as_float(load_shared_word(address)); }
DEVICE void store_shared2(uint32_t address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}
DEVICE float2 load_shared2(uint32_t address) {
  const uint2 v = load_shared_words(address);
  return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}

// Prefetches bytes to the L2 for a later kernel: a multiple of 16, from a 16-byte aligned address. Does nothing below sm_90.
DEVICE void prefetch_to_l2(const void* source, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
#endif
}

// Starts a copy of 16 bytes to shared memory past L1. The bytes from `source_bytes` on (0 to 16) become zero and are
// not read.
DEVICE void cp_async16(uint32_t shared, const void* source, int source_bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(source), "r"(source_bytes)
               : "memory");
}

// Starts a copy of 16 bytes of weights, which are read once, with a hint to bring whole lines of 128 bytes to the L2. Without the hint
// the memory answers in 64-byte pieces: a large product took 73 us without it and 67 us with it.
DEVICE void cp_async16_lines(uint32_t shared, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(source) : "memory");
}

// Starts the same copy if it is `wanted`, by a predicate instead of a branch.
DEVICE void cp_async16_lines(uint32_t shared, const void* source, bool wanted) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n}" ::"r"(shared),
               "l"(source), "r"(static_cast<int>(wanted))
               : "memory");
}

DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Lets the thread arrive at a barrier of mbarrier.cuh once all its copies so far are there: one of the arrivals of a phase.
DEVICE void cp_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until all of the thread's copies are there, committed or not.
DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Waits until at most `PENDING` of the thread's committed groups are in flight. Other threads need a barrier as well to see the copies.
template <int PENDING>
DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Tensor core products of four warps together (wgmma, sm_90a only), with operands in shared memory.
//
// The sums c (64 x N) are spread over the warpgroup as the c of mma.cuh is over a warp: warp w has rows 16 w .. 16 w + 15, and
// c[4 j .. 4 j + 3] of a lane are its four sums of column tile j.
#pragma once
#include "types.cuh"

// Returns the descriptor of an operand in shared memory: panels of rows of SWIZZLE bytes, whose 16-byte chunks are permuted
// as the copy engine does. Where the product sums along a row, `panel_bytes` is ignored, and each further 16 elements of the
// sum start 32 bytes further in the row. Where the product sums over the rows (an operand "of rows"), a row goes on in the
// next panel, `panel_bytes` further, and each further 16 elements of the sum start 16 rows further. `descriptor_step` of
// such a distance in bytes, added to a descriptor, goes there.
template <int SWIZZLE>
DEVICE uint64_t wgmma_descriptor(uint32_t shared, int panel_bytes) {
  static_assert(SWIZZLE == 128 || SWIZZLE == 64, "SWIZZLE");
  const uint64_t kind = SWIZZLE == 128 ? 1 : 2, rows8 = 8 * SWIZZLE;
  return kind << 62 | rows8 >> 4 << 32 | static_cast<uint64_t>(panel_bytes) >> 4 << 16 | (shared & 0x3FFFF) >> 4;
}

DEVICE constexpr uint64_t descriptor_step(int bytes) { return bytes >> 4; }

// Must come between the warpgroup's writes to registers and the first product that uses them.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `PENDING` of the committed groups still run. Registers of the groups that
// have finished must go through `settle` before they are used.
template <int PENDING>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving uses of these registers across this call: it does not know that products write them late.
template <int COUNT>
DEVICE void settle(float (&registers)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

template <int COUNT>
DEVICE void settle(int (&registers)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

template <int COUNT>
DEVICE void settle(uint32_t (&registers)[COUNT][4]) {
#pragma unroll
  for (int i = 0; i < COUNT * 4; ++i) asm volatile("" : "+r"(registers[i / 4][i % 4])::"memory");
}

// Keeps the arithmetic that `positive` comes from in front of the next wgmma_wait: ptxas would move all of it behind, where
// no product runs beside it. It is a store of a number below zero, which never happens; `shared` is any address in shared memory.
DEVICE void finish_before_wait(float positive, uint32_t shared) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p st.shared.f32 [%1], %0;\n}" ::"f"(positive),
               "r"(shared)
               : "memory");
}

#ifdef CPMRT_BF16
#define WGMMA_TYPES "bf16.bf16"
#else
#define WGMMA_TYPES "f16.f16"
#endif

#define WGMMA_R0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_R1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_R2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_R3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_SUMS4(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define WGMMA_SUMS16(c, i) WGMMA_SUMS4(c, i), WGMMA_SUMS4(c, i + 4), WGMMA_SUMS4(c, i + 8), WGMMA_SUMS4(c, i + 12)
#define WGMMA_SUMS32(c, i) WGMMA_SUMS16(c, i), WGMMA_SUMS16(c, i + 16)

// wgmma_shared: c (+)= a b, a (64 x 16) and b (16 x N) both summed along their rows in shared memory; without
// `accumulate` c is only written. wgmma_registers: c += a b, a in registers as mma takes it, b an operand of rows.
// REGISTERS: the asm operand numbers of c; A to E: those of the operands after it.
#define WGMMA(N, REGISTERS, SUMS, A, B, C, D, E)                                                                     \
  DEVICE void wgmma_shared(float (&c)[N / 2], uint64_t a, uint64_t b, bool accumulate) {         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" C ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N               \
                 "k16.f32." WGMMA_TYPES " {" REGISTERS "}, %" A ", %" B ", p, 1, 1, 0, 0;\n}"                        \
                 : SUMS                                                                                              \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                               \
  }                                                                                                                  \
  DEVICE void wgmma_registers(float (&c)[N / 2], const uint32_t (&a)[4], uint64_t b) {           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n" #N                    \
                 "k16.f32." WGMMA_TYPES " {" REGISTERS "}, {%" A ", %" B ", %" C ", %" D "}, %" E                    \
                 ", p, 1, 1, 1;\n}"                                                                                  \
                 : SUMS                                                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                              \
  }

#define WGMMA_LIST(...) __VA_ARGS__

WGMMA(64, WGMMA_R0 ", " WGMMA_R1, WGMMA_LIST(WGMMA_SUMS32(c, 0)), "32", "33", "34", "35", "36")
WGMMA(96, WGMMA_R0 ", " WGMMA_R1 ", " WGMMA_R2, WGMMA_LIST(WGMMA_SUMS32(c, 0), WGMMA_SUMS16(c, 32)), "48", "49", "50",
      "51", "52")
WGMMA(128, WGMMA_R0 ", " WGMMA_R1 ", " WGMMA_R2 ", " WGMMA_R3, WGMMA_LIST(WGMMA_SUMS32(c, 0), WGMMA_SUMS32(c, 32)),
      "64", "65", "66", "67", "68")

#undef WGMMA

// multiply_tile: c (+)= a b, a in registers as mma takes it, b (16 x N) summed along its rows in shared memory.
#define WGMMA_TILE(N, REGISTERS, SUMS, A, B, C, D, E, F)                                                             \
  DEVICE void multiply_tile(float (&c)[N / 2], const uint32_t (&a)[4], uint64_t b,               \
                                                bool accumulate) {                                                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" F ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N                 \
                 "k16.f32." WGMMA_TYPES " {" REGISTERS "}, {%" A ", %" B ", %" C ", %" D "}, %" E                    \
                 ", p, 1, 1, 0;\n}"                                                                                  \
                 : SUMS                                                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));           \
  }

WGMMA_TILE(64, WGMMA_R0 ", " WGMMA_R1, WGMMA_LIST(WGMMA_SUMS32(c, 0)), "32", "33", "34", "35", "36", "37")
WGMMA_TILE(128, WGMMA_R0 ", " WGMMA_R1 ", " WGMMA_R2 ", " WGMMA_R3, WGMMA_LIST(WGMMA_SUMS32(c, 0), WGMMA_SUMS32(c, 32)),
           "64", "65", "66", "67", "68", "69")

#undef WGMMA_TILE

// multiply_bytes: c (+)= a b, signed bytes; a (64 x 32) in registers as mma_bytes takes it, b (32 x N) summed along its rows in shared
// memory.
#define WGMMA_BYTES(N, REGISTERS, SUMS, A, B, C, D, E, F)                                                            \
  DEVICE void multiply_bytes(int (&c)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {                 \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" F ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N                 \
                 "k32.s32.s8.s8 {" REGISTERS "}, {%" A ", %" B ", %" C ", %" D "}, %" E ", p;\n}"                    \
                 : SUMS                                                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));           \
  }

#undef WGMMA_SUMS4
#define WGMMA_SUMS4(c, i) "+r"(c[i]), "+r"(c[i + 1]), "+r"(c[i + 2]), "+r"(c[i + 3])

WGMMA_BYTES(32, WGMMA_R0, WGMMA_LIST(WGMMA_SUMS16(c, 0)), "16", "17", "18", "19", "20", "21")
WGMMA_BYTES(64, WGMMA_R0 ", " WGMMA_R1, WGMMA_LIST(WGMMA_SUMS32(c, 0)), "32", "33", "34", "35", "36", "37")

#undef WGMMA_BYTES

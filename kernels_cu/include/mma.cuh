// Tensor core products of scalar_t with fp32 sums, and ldmatrix, which loads their operands (sm_80 and later).
#pragma once
#include "types.cuh"

// c (16x8) += a (16x16, row-major) b (16x8, column-major). With g = lane / 4 and t = lane % 4 a lane holds
//   a  {a[g][2t..], a[g+8][2t..], a[g][2t+8..], a[g+8][2t+8..]}, pairs    b  {b[2t..][g], b[2t+8..][g]}, pairs
//   c  {c[g][2t], c[g][2t+1], c[g+8][2t], c[g+8][2t+1]}
DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef CPMRT_BF16
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
#endif
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c (16x8) += a (16x32, row-major) b (32x8, column-major), signed bytes. With g and t as above a lane holds four neighbours each:
//   a  {a[g][4t..], a[g+8][4t..], a[g][4t+16..], a[g+8][4t+16..]}    b  {b[4t..][g], b[4t+16..][g]}    c  as above
DEVICE void mma_bytes(int (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Loads four 8x8 matrices; lane i gives the address of row i % 8 of matrix i / 8 (see shared_address in copy.cuh).
DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

DEVICE void ldmatrix_x4_transposed(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// Transposes an 8x8 matrix, of which lane i gives and gets elements 2 (i % 4) and 2 (i % 4) + 1 of row i / 4.
DEVICE uint32_t transposed(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

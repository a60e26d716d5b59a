// Heads of lightning attention, each of which a warp normalises and rotates, and the address of a slot's state.
#pragma once
#include "copy.cuh"

static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "HEAD_DIM must be 64 or 128");

constexpr int kHalf = HEAD_DIM / 2;
constexpr int kPairs = HEAD_DIM / 64;     // pairs that a lane rotates: an element of the first half, its partner in the second
constexpr float kScale = HEAD_DIM == 128 ? 0.088388347648318447f : 0.125f;  // D^-0.5
constexpr int kDecays = kPageTokens + 1;  // columns of `decay`: exp(-slope i) for i = 0 .. 64

// A lane's part of a head: kPairs elements of each half, from element kPairs * lane of the half on.
struct HeadPart {
  float first[kPairs], second[kPairs];

  DEVICE static void load(float (&to)[kPairs], const scalar_t* from) {
    if constexpr (kPairs == 2) {
      const float2 pair = unpack2(*reinterpret_cast<const uint32_t*>(from));
      to[0] = pair.x, to[1] = pair.y;
    } else {
      to[0] = to_float(*from);
    }
  }

  DEVICE static HeadPart of(const scalar_t* head, int lane) {
    HeadPart part;
    load(part.first, head + lane * kPairs);
    load(part.second, head + kHalf + lane * kPairs);
    return part;
  }

  // RMSNorm of the head, by a whole warp. Every operation is written out, so that the bits do not depend on what the compiler
  // would contract.
  DEVICE void normalise(const scalar_t* weight, int lane, float eps) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPairs; i++) sum = fmaf(second[i], second[i], fmaf(first[i], first[i], sum));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
    const float scale = 1.0f / sqrtf(fmaf(sum, 1.0f / HEAD_DIM, eps));
    const HeadPart w = of(weight, lane);
#pragma unroll
    for (int i = 0; i < kPairs; i++) first[i] *= scale * w.first[i], second[i] *= scale * w.second[i];
  }

  // Rotates the head by the angles of `position`. `rope` (2, max_context, D/2): cos, sin.
  DEVICE void rotate(const float* rope, int position, int max_context, int lane) {
    const float* angles = rope + static_cast<int64_t>(position) * kHalf + lane * kPairs;
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      const float c = __ldg(angles + i), s = __ldg(angles + static_cast<int64_t>(max_context) * kHalf + i), a = first[i];
      first[i] = fmaf(a, c, -__fmul_rn(second[i], s));
      second[i] = fmaf(second[i], c, __fmul_rn(a, s));
    }
  }
};

// Returns a head of queries or keys, normalised if `norm` is not null and then rotated if `rope` is not null; not yet rounded. All
// lanes of a warp.
DEVICE HeadPart made_head(const scalar_t* source, const scalar_t* norm, const float* rope, int position,
                          int max_context, float eps, int lane) {
  HeadPart part = HeadPart::of(source, lane);
  if (norm != nullptr) part.normalise(norm, lane, eps);
  if (rope != nullptr) part.rotate(rope, position, max_context, lane);
  return part;
}

// Returns the matrix (D, D) of a head of a slot in one layer's states (B, H, D, D).
DEVICE float* state_of(float* states, int slot, int num_heads, int head) {
  return states + (static_cast<int64_t>(slot) * num_heads + head) * (HEAD_DIM * HEAD_DIM);
}

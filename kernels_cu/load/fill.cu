// Random weights for a model that has only a config.
//
//   formula   out[i] = round(mean + deviation * z[i]), z standard normal, a function of (seed, i) only
//   operands  out (n) scalar_t
//   launch    any grid, block 256, no shared memory
//   numerics  fp32, one rounding; z from 16-bit uniforms, so |z| < 4.9
//   oracle    weights/dummy.py dummy: the same mean and deviation, other random numbers
//   source    SplitMix64 (Steele, Lea, Flood 2014, doi 10.1145/2660193.2660195) as a hash of the index; Box-Muller
//   layout    64 random bits are four elements, which a thread stores one by one: any n and any element alignment
#include "types.cuh"

constexpr int kWords = 4;

// Returns the output function of SplitMix64 of a state.
DEVICE unsigned long long mix(unsigned long long state) {
  state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9ull;
  state = (state ^ (state >> 27)) * 0x94d049bb133111ebull;
  return state ^ (state >> 31);
}

// Returns two standard normal values made of two 16-bit integers. Adding 0.5 keeps the logarithm finite.
DEVICE float2 normal_pair(unsigned radius_bits, unsigned angle_bits) {
  const float radius = sqrtf(-2.f * __logf((radius_bits + 0.5f) * 0x1p-16f));
  float sine, cosine;
  sincospif((angle_bits + 0.5f) * 0x1p-15f, &sine, &cosine);
  return make_float2(radius * cosine, radius * sine);
}

// formula: out[i] = 64 random bits, a function of (seed, i) only.  operands: out (n) uint64.  oracle: none, they are codes.
extern "C" __global__ void KERNEL(fill_words)(unsigned long long* __restrict__ out, int64_t n, unsigned long long seed) {
  pdl_begin();
  const int64_t stride = (int64_t)gridDim.x * blockDim.x;
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += stride)
    out[i] = mix(seed + (i + 1) * 0x9e3779b97f4a7c15ull);
}

extern "C" __global__ void KERNEL(fill_normal)(scalar_t* __restrict__ out, int64_t n, unsigned long long seed,
                                               float mean, float deviation) {
  pdl_begin();
  const int64_t groups = (n + kWords - 1) / kWords, stride = (int64_t)gridDim.x * blockDim.x;
  for (int64_t group = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; group < groups; group += stride) {
    const unsigned long long bits = mix(seed + (group + 1) * 0x9e3779b97f4a7c15ull);
    const float2 first = normal_pair(bits & 0xffff, bits >> 16 & 0xffff);
    const float2 second = normal_pair(bits >> 32 & 0xffff, bits >> 48);
    const float values[kWords] = {first.x, first.y, second.x, second.y};
#pragma unroll
    for (int word = 0; word < kWords; word++) {
      const int64_t i = group * kWords + word;
      if (i < n) out[i] = from_float(mean + deviation * values[word]);
    }
  }
}

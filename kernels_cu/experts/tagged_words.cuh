// What blocks hand to each other while they run: words of two columns, or a sum, and the number of the launch that wrote them. A word
// is written and read whole, so that whoever sees the number has the rest too.
#pragma once
#include "copy.cuh"

struct TaggedWords {
  uint64_t* words;   // the number of launches before this one, nothing, then the words
  uint32_t tag;      // the number of this launch

  DEVICE uint64_t* at(int index) const { return words + 2 + index; }

  DEVICE void store(int index, uint32_t value) const {
    const uint64_t word = value | static_cast<uint64_t>(tag) << 32;
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at(index)), "l"(word) : "memory");
  }
  DEVICE uint64_t load(int index) const {
    uint64_t word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(at(index)) : "memory");
    return word;
  }
  // Of a tile of eight columns lane 4 g has column g; its words are those from `index` on. All lanes.
  DEVICE void store_tile(int index, scalar_t value) const {
    const uint32_t own = reinterpret_cast<const uint16_t&>(value), next = __shfl_down_sync(0xFFFFFFFFu, own, 4);
    const int lane = threadIdx.x % 32;
    if (lane % 8 == 0) store(index + lane / 8, own | next << 16);
  }
  // Until one of the lanes' words is this launch's. All lanes.
  DEVICE void wait_for_any(int index) const {
    while (!__any_sync(0xFFFFFFFFu, load(index) >> 32 == tag)) {
    }
  }
  // Floats in words `distance` apart, once all are this launch's.
  template <int COUNT>
  DEVICE void wait_for(float (&values)[COUNT], int index, int distance) const {
    bool is_missing;
    do {
      is_missing = false;
      uint64_t held[COUNT];
#pragma unroll
      for (int i = 0; i < COUNT; i++) held[i] = load(index + i * distance);
#pragma unroll
      for (int i = 0; i < COUNT; i++) is_missing |= held[i] >> 32 != tag, values[i] = __uint_as_float(static_cast<uint32_t>(held[i]));
    } while (is_missing);
  }
  // Two words, columns in x and z; `index` is even.
  DEVICE uint4 load2(int index) const {
    ulonglong2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(at(index)) : "memory");
    return make_uint4(v.x, v.x >> 32, v.y, v.y >> 32);
  }
  DEVICE uint4 present() const { return make_uint4(0, tag, 0, tag); }
  DEVICE uint4 absent() const { return make_uint4(0, ~tag, 0, ~tag); }
  DEVICE bool has_come(const uint4& two) const { return two.y == tag && two.w == tag; }
  // Once all blocks know the number. One thread of all.
  DEVICE void count_launch() const { *reinterpret_cast<uint32_t*>(words) = tag; }
};

// Words in global memory by which the blocks of a launch send each other values while they run. The low half of a word is two
// columns or a sum, the high half the number of the launch that wrote it. A word is written and read whole, so that a reader that sees
// the number has the value too.
#pragma once
#include "copy.cuh"

struct TaggedWords {
  uint64_t* words;   // [0]: the number of launches before this one; [1]: unused; from [2] on the words that are sent
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
  // Stores a tile of eight columns, of which lane 4 g has column g, in the four words from `index` on. All lanes.
  DEVICE void store_tile(int index, scalar_t value) const {
    const uint32_t own = reinterpret_cast<const uint16_t&>(value), next = __shfl_down_sync(0xFFFFFFFFu, own, 4);
    const int lane = threadIdx.x % 32;
    if (lane % 8 == 0) store(index + lane / 8, own | next << 16);
  }
  // Waits until the word `index` of at least one lane has this launch's number. All lanes.
  DEVICE void wait_for_any(int index) const {
    while (!__any_sync(0xFFFFFFFFu, load(index) >> 32 == tag)) {
    }
  }
  // Waits until COUNT words, from `index` on and `distance` apart, have this launch's number, and returns their floats in `values`.
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
  // Returns two words, their values in x and z, their numbers in y and w. `index` is even.
  DEVICE uint4 load2(int index) const {
    ulonglong2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(at(index)) : "memory");
    return make_uint4(v.x, v.x >> 32, v.y, v.y >> 32);
  }
  // Two words as load2 returns them, with this launch's number and with another.
  DEVICE uint4 present() const { return make_uint4(0, tag, 0, tag); }
  DEVICE uint4 absent() const { return make_uint4(0, ~tag, 0, ~tag); }
  DEVICE bool has_come(const uint4& two) const { return two.y == tag && two.w == tag; }
  // Counts this launch, once all blocks have read the number of launches before it. One thread of the grid.
  DEVICE void count_launch() const { *reinterpret_cast<uint32_t*>(words) = tag; }
};

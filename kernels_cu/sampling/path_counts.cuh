// Token counts as a node of a draft tree sees them: those of its slot, with the tokens of its path counted as generated.
#pragma once

#include "sampling_chain.cuh"

struct PathCounts {
  static constexpr bool kIsMasked = false;
  const uint32_t* words;
  const int* path;
  int length;

  DEVICE uint32_t of(int token) const {
    uint32_t word = words[token];
    for (int i = 0; i < length; i++) {
      if (path[i] == token) word = (word + 1) | kSeen;
    }
    return word;
  }
};

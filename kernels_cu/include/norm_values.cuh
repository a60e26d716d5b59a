// The two passes of RMSNorm over packed values of a row: their squares summed, then each times scale and weight, rounded.
#pragma once
#include "types.cuh"

DEVICE float squares(uint32_t pair) {
  const float2 v = unpack2(pair);
  return v.x * v.x + v.y * v.y;
}

DEVICE float squares(uint4 v) { return squares(v.x) + squares(v.y) + squares(v.z) + squares(v.w); }

DEVICE uint32_t normalised(uint32_t pair, uint32_t weight, float scale) {
  const float2 v = unpack2(pair), w = unpack2(weight);
  return pack2(v.x * scale * w.x, v.y * scale * w.y);
}

DEVICE uint4 normalised(uint4 v, uint4 w, float scale) {
  return make_uint4(normalised(v.x, w.x, scale), normalised(v.y, w.y, scale), normalised(v.z, w.z, scale), normalised(v.w, w.w, scale));
}

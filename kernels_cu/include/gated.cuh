// The gated activation of an mlp: activation(gate) * up of two neighbours in memory, with SiLU, or with FATRELU the activation of
// fatrelu.cuh. Float32 with the fast exponential and division (a few units in the last place), rounded once.
#pragma once
#include "fatrelu.cuh"

DEVICE float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

DEVICE uint32_t gated(uint32_t gate, uint32_t up) {
  const float2 g = unpack2(gate), u = unpack2(up);
#ifdef FATRELU
  return pack2(fatrelu_mul(g.x, u.x), fatrelu_mul(g.y, u.y));
#else
  return pack2(silu(g.x) * u.x, silu(g.y) * u.y);
#endif
}

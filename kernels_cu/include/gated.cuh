// The sigmoid, and the gated activation of an mlp: activation(gate) * up. The activation is SiLU. Where FATRELU is defined it is FATReLU, and
// FATRELU has the bits of its threshold, a float. All is float32, with the fast exponential and reciprocal (a few units in the last place).
#pragma once
#include "fast_math.cuh"

// Returns 1 / (1 + e^-x). An exact division has a branch; without one the values that a thread finishes are computed side by side.
DEVICE float sigmoid(float x) { return reciprocal_fast(1.0f + exp2_fast(x * -1.44269504f)); }

// Returns activation(gate) * up. With FATRELU (arXiv 2402.13516) it is 0 up to the threshold, whatever up is.
DEVICE float gated(float gate, float up) {
#ifdef FATRELU
  return gate > __int_as_float(FATRELU) ? gate * up : 0.0f;
#else
  return gate * sigmoid(gate) * up;
#endif
}

// Returns the same of two neighbours in memory, rounded once.
DEVICE uint32_t gated_pair(uint32_t gate, uint32_t up) {
  const float2 g = unpack2(gate), u = unpack2(up);
  return pack2(gated(g.x, u.x), gated(g.y, u.y));
}

// The gated activation of models whose gates are mostly zero. FATRELU, where it is defined, is its
// threshold, as the bits of a float.
#pragma once
#include "types.cuh"

#ifdef FATRELU
// Returns gate * up where the gate is above the threshold, else 0, whatever up is (FATReLU: arXiv 2402.13516).
DEVICE float fatrelu_mul(float gate, float up) { return gate > __int_as_float(FATRELU) ? gate * up : 0.0f; }
#endif

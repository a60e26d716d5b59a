// Unpacks blocks of GGUF files to 16-bit weights, while they are loaded: for an embedding, of which a step reads a few rows.
//
// Formula: W = scale * (code - middle) + offset, as the file says.
// Operands: out (count, 8) scalar_t; fault (1) uint32, set to 1 if a weight is not finite in scalar_t, else left alone (may be mapped
//   host memory); blocks (bytes of 8 count weights); count: runs of eight weights
// Constants: FORMAT: the block type's number in a file.
// Grid: any number of blocks of 256 threads; no dynamic shared memory.
// Numerics: scale, product and sum are rounded to float32 as in NumPy, the weight once more, to nearest.
// Oracle: BlockType.values of cpmrt/weights/formats/blocks.py.
// Source: original; formats as in ggml.
// Why so: eight weights share a block and a scale, and are one store.
#if !defined(FORMAT)
#error "a constant is not defined"
#endif
#include "copy.cuh"
#include "gguf_blocks.cuh"

static_assert(kBlock.group % 8 == 0, "eight weights share a scale");

extern "C" __global__ void __launch_bounds__(256) KERNEL(unpack_blocks)(
    scalar_t* out, uint32_t* fault, const unsigned char* blocks, int64_t count) {
  pdl_begin();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < count; i += static_cast<int64_t>(gridDim.x) * 256) {
    const int first = static_cast<int>(i * 8 % kBlock.weights);
    const Bytes block = blocks + i * 8 / kBlock.weights * kBlock.bytes;
    const float2 by = block_scales(block, first / kBlock.group);
    uint32_t words[4];
    bool is_finite = true;
#pragma unroll
    for (int w = 0; w < 4; w++) {
      float values[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float code = static_cast<int>(block_code(block, first + w * 2 + e)) - kMiddle;
        values[e] = __fmul_rn(by.x, code);
        if (kHasOffsets) values[e] = __fadd_rn(values[e], by.y);   // not without offsets: a product of -0 stays -0
      }
      words[w] = pack2(values[0], values[1]);
      const float2 rounded = unpack2(words[w]);
      is_finite = is_finite && isfinite(rounded.x) && isfinite(rounded.y);
    }
    store16(out + i * 8, make_uint4(words[0], words[1], words[2], words[3]));
    if (!is_finite) *fault = 1;
  }
}

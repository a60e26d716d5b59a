// Weights in blocks of GGUF files to the packed layout of packed_layout.cuh, while they are loaded.
//
// Formula: W[n, k] = scale * (code - middle) + offset as in the file; u[n, k] = code - middle + 2^(WEIGHT_BITS - 1) with ZEROS 0, with
//   ZEROS 2 u = code and minimum = scale * middle - offset.
// Operands: packed bytes, see packed_layout.cuh; blocks (N, row_bytes) bytes, rows of the weight from first_row on; fault (1) uint32,
//   set to 1 if a scale or a minimum is not finite in scalar_t, else left alone (may be mapped host memory)
// Constants: LINEAR: the product, 0 qkv, 1 residual, 2 gate_up, 3 head. HEAD_DIM: of qkv only, elements of a head.
//   FORMAT: the block type's number in a file. IN_FEATURES: K, the columns of W, a multiple of 128. WEIGHT_BITS: 4, or 8
//   with ZEROS 0 or 2, or 2 with ZEROS 0. RUNS: contiguous parts of K, summed in order: 8 or 1. SCALE_GROUP: columns that
//   share a scale: 16, 32, 64 or 128. ZEROS: 2 has minimums beside the scales; 0: codes are symmetric
// Grid: any number of blocks of 256 threads; no dynamic shared memory.
// Numerics: codes as they are; scales and minimums are float32 products, rounded once, to nearest.
// Oracle: cpmrt/weights/formats/blocks.py.
// Source: original; formats as in ggml.
// Why so: as repack.cu: a thread owns 16 bytes of the result, whatever sources its two rows come from.
#if !defined(LINEAR) || (LINEAR == 0 && !defined(HEAD_DIM)) || !defined(FORMAT) || !defined(IN_FEATURES) || \
    !defined(WEIGHT_BITS) || !defined(RUNS) || !defined(SCALE_GROUP) || !defined(ZEROS)
#error "a constant is not defined"
#endif
#include "copy.cuh"
#include "gguf_blocks.cuh"
#include "packed_writing.cuh"

static_assert(ZEROS != 1, "blocks have minimums, not zero points");
static_assert(K % kBlock.weights == 0, "K must be whole blocks");
constexpr int kAddend = ZEROS == 0 ? (1 << WEIGHT_BITS - 1) - kMiddle : 0;

// Returns the block of row n that holds column k. With `paired` a head's rows lie in the file as 0, D/2, 1, D/2 + 1, ...
DEVICE Bytes block_of(Bytes blocks, int n, int k, int paired) {
#if LINEAR == 0
  if (paired) n = n / HEAD_DIM * HEAD_DIM + n % (HEAD_DIM / 2) * 2 + n % HEAD_DIM / (HEAD_DIM / 2);
#endif
  return blocks + (static_cast<int64_t>(n) * (K / kBlock.weights) + k / kBlock.weights) * kBlock.bytes;
}

// Writes the codes of rows first_row .. first_row + N - 1 of a weight with num_rows rows; those of other rows stay.
extern "C" __global__ void __launch_bounds__(256) KERNEL(repack_block_codes)(
    unsigned char* packed, const unsigned char* blocks, int first_row, int N, int num_rows, int num_tiles, int paired) {
  pdl_begin();
  write_codes(
      packed, first_row, N, num_rows, num_tiles, [](int first, int e) { return (first + e) % kBlock.weights; },
      [=](int n, int first, int of_block) { return block_code(block_of(blocks, n, first, paired), of_block) + kAddend; });
}

// Writes the scales of the same rows, and with ZEROS their minimums.
extern "C" __global__ void __launch_bounds__(256) KERNEL(repack_block_scales)(
    unsigned char* packed, uint32_t* fault, const unsigned char* blocks, int first_row, int N, int num_rows, int num_tiles, int paired) {
  pdl_begin();
  constexpr int kScales = kSlices * kUnitScales;
  const int64_t total = static_cast<int64_t>(num_tiles) * kScales * 16;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < total; i += static_cast<int64_t>(gridDim.x) * 256) {
    const int row = i & 15, scale = static_cast<int>((i >> 4) % kScales), tile = static_cast<int>((i >> 4) / kScales);
    const int n = tile_row(tile, row, num_rows) - first_row, k = scale * SCALE_GROUP;
    if (n < 0 || n >= N) continue;
    unsigned char* const unit = packed + unit_offset(tile, scale / kUnitScales) + kCodeBytes + scale % kUnitScales * kScaleBytes;
    scalar_t* const to = reinterpret_cast<scalar_t*>(unit) + (row % 8 * 2 + row / 8) * (ZEROS ? 2 : 1);
    const float2 found = block_scales(block_of(blocks, n, k, paired), k % kBlock.weights / kBlock.group);
    to[0] = from_float(found.x);
    if (ZEROS) to[1] = from_float(found.x * kMiddle - found.y);
    if (!isfinite(to_float(to[0])) || (ZEROS && !isfinite(to_float(to[1])))) *fault = 1;
  }
}

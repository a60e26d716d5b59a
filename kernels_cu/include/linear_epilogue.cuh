// Tiles and epilogues of the skinny products, a pair of structs for each product. The Tiles struct says which 16 rows of W a tile takes, the
// epilogue turns the tile's sums into outputs.
//
// A kernel calls prefetch(nt, i, tile, row, token) for each output that a thread will finish, at a point where its reads delay nothing;
// settle() once, with a barrier between it and the first store; and store(nt, i, tile, row, token, lo, hi) with the sums of an output. An
// epilogue of LINEAR 0 also has prepare(shared), publish() and look_up(), which are called in this order after pdl_wait, before those.
// NT: tiles of 8 tokens, nt is one of them; PAIRS: outputs (lo row, hi row, token) of a token tile that one thread finishes, i is one of
// them. packed_exchange.cuh passes nt = 0 for every token tile. GUESSES (one row only): guess() and guess_angle() are called before
// pdl_wait, and in rounds after the first forget_guess() before prefetch(). With HEAD_ROUNDS (kernels that go on with the attention of
// the row) a cluster of kHeadBlocks takes the tiles that a KV head needs, and GROUP is the number of its query heads.
#pragma once
#include "copy.cuh"
#include "gated.cuh"

// Returns sum + bias. The compiler cannot contract this addition with the product before it, so all kernels give the same bits.
DEVICE float biased(float sum, scalar_t bias) { return __fadd_rn(sum, to_float(bias)); }

#if LINEAR == 0
constexpr int kHalf = HEAD_DIM / 2, kHeadTiles = HEAD_DIM / 16;

// Tiles of qkv. Tile i of a head has dimensions 8 i .. 8 i + 7 (lo) and the 8 dimensions D/2 further (hi), their partners in the rotation.
struct QkvTiles {
  int num_tiles, num_groups;
  static DEVICE int dimension(int tile, int row) { return tile % kHeadTiles * 8 + row; }
  DEVICE int lo(int tile, int row) const { return tile / kHeadTiles * HEAD_DIM + dimension(tile, row); }
  DEVICE int hi(int tile, int row) const { return lo(tile, row) + kHalf; }
};

#ifdef HEAD_ROUNDS
constexpr int kHeadBlocks = 8;

// Returns the `own`-th of the tiles that the cluster's KV head needs: those of its GROUP query heads, of its key, of its value.
DEVICE int kv_head_tile(int own) {
  constexpr int kQueryTiles = GROUP * kHeadTiles;
  const int kv_head = blockIdx.x / kHeadBlocks, num_kv_heads = gridDim.x / kHeadBlocks;
  if (own < kQueryTiles) return kv_head * kQueryTiles + own;
  return (num_kv_heads * (own / kHeadTiles) + kv_head) * kHeadTiles + own % kHeadTiles;   // head GROUP is the key, GROUP + 1 the value
}
#endif

// Rotates a dimension and its partner in place. Contractions are written out, so that the compiler rounds in one way everywhere: a row's
// bits do not depend on TOKEN_TILES.
DEVICE void rotate(float& lo, float& hi, float cosine, float sine) {
  const float first = lo;
  lo = fmaf(first, cosine, -__fmul_rn(hi, sine));
  hi = fmaf(hi, cosine, __fmul_rn(first, sine));
}

// Adds the bias, rotates q and k by the row's position, stores q, and stores k and v in the pages of the row's slot. With k_pages null
// q, k and v are stored in `q`, unrotated.
template <int NT, int PAIRS, bool GUESSES = false>
struct QkvEpilogue {
  scalar_t *q, *k_pages, *v_pages;
  const scalar_t* bias;
  const float* rope;
  const int *positions, *locations, *slots, *block_tables;
  int T, num_heads, num_kv_heads, pages_per_sequence, max_context;
  uint32_t place;   // shared memory, an int2 for each token: position, and number among the tokens of all pages (-1: not stored)
  int slot, position, location, stored;   // of the token that this thread looks up
  int guessed_slot = 0, guessed_position = -1, guessed_location = 0, page;
  // Whether `prefetch` reads the angles. Else `store` does: there are no registers to keep those of eight tiles.
  static constexpr bool kEarly = NT < 8;
  float cosine[kEarly ? NT : 1][PAIRS], sine[kEarly ? NT : 1][PAIRS];

  DEVICE bool looks_up() const { return k_pages != nullptr && threadIdx.x < T; }
  // Guesses the row's slot, position and location before pdl_wait by reading them early: in the first layer they may still be those of
  // the step before. What is read early for a guess is used only if `prepare` then finds the same after the wait.
  DEVICE void guess() {
    if (k_pages == nullptr) return;
    const int slot = load_now(slots), position = load_now(positions);
    const int location = locations == nullptr ? position : load_now(locations);
    const bool is_used = slot >= 0;
    guessed_slot = is_used ? slot : 0, guessed_position = is_used ? position : 0, guessed_location = is_used ? location : 0;
  }
  // Reads the angle of an output for the guessed position.
  DEVICE void guess_angle(int i, int tile, int row) {
    if (k_pages != nullptr && tile / kHeadTiles < num_heads + num_kv_heads) read_angle(0, i, tile, row, guessed_position);
  }
  DEVICE void forget_guess() { guessed_position = -1; }
  // Reads the slot, position and location of the thread's token. Must come after pdl_wait, as must whatever starts the next kernel:
  // decode_attention reads early what is older than this launch.
  DEVICE void prepare(uint32_t shared) {
    place = shared;
    if (!looks_up()) return;
    slot = read_now(slots + threadIdx.x);
    position = read_now(positions + threadIdx.x);
    location = read_now((locations == nullptr ? positions : locations) + threadIdx.x);
    if (GUESSES) page = read_now(page_entry(guessed_slot, guessed_location));
  }
  // Loads at this place in the program, not later as the compiler would.
  DEVICE static int read_now(const int* source) {
    int value;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
    return value;
  }
  // Shares the token's position with the block. Called when x is on its way, since it waits for what `prepare` reads; a barrier must come
  // before angles are read.
  DEVICE void publish() const {
    if (looks_up()) store_shared_word(place + threadIdx.x * 8, slot < 0 ? 0 : position);
  }
  // Finds where keys and values of the token go. The page depends on two reads, one after the other, and is not needed before a value is
  // stored: nothing waits for it in between.
  DEVICE void look_up() {
    stored = -1;
    if (!looks_up() || slot < 0) return;
    if (!GUESSES || slot != guessed_slot || location != guessed_location) page = *page_entry(slot, location);
    stored = page * kPageTokens + location % kPageTokens;
  }
  DEVICE const int* page_entry(int slot, int location) const {
    return block_tables + static_cast<int64_t>(slot) * pages_per_sequence + location / kPageTokens;
  }
  // Shares with the block where the token's keys and values go.
  DEVICE void settle() const {
    if (looks_up()) store_shared_word(place + threadIdx.x * 8 + 4, stored);
  }
  DEVICE int2 position_and_place(int token) const {
    const uint2 v = load_shared_words(place + token * 8);
    return make_int2(v.x, v.y);
  }
  DEVICE void prefetch(int nt, int i, int tile, int row, int token) {
    if (kEarly) find_angle(nt, i, tile, row, token);
  }
  // Reads the angle of an output that is rotated, unless it was guessed right.
  DEVICE void find_angle(int nt, int i, int tile, int row, int token) {
    if (k_pages == nullptr || tile / kHeadTiles >= num_heads + num_kv_heads) return;
    const int at = position_and_place(token).x;
    if (!GUESSES || at != guessed_position) read_angle(nt, i, tile, row, at);
  }
  DEVICE void read_angle(int nt, int i, int tile, int row, int at) {
    const float* angle = rope + static_cast<int64_t>(at) * kHalf + QkvTiles::dimension(tile, row);
    cosine[nt][i] = GUESSES ? load_now(angle) : __ldg(angle);
    angle += static_cast<int64_t>(max_context) * kHalf;
    sine[nt][i] = GUESSES ? load_now(angle) : __ldg(angle);
  }
  DEVICE void store(int nt, int i, int tile, int row, int token, float lo, float hi) {
    const int head = tile / kHeadTiles, d = QkvTiles::dimension(tile, row);
    if (bias != nullptr) lo = biased(lo, bias[head * HEAD_DIM + d]), hi = biased(hi, bias[head * HEAD_DIM + d + kHalf]);
    scalar_t* out;
    if (k_pages == nullptr) {
      out = q + static_cast<int64_t>(token) * (num_heads + 2 * num_kv_heads) * HEAD_DIM + head * HEAD_DIM;
    } else {
      if (head < num_heads + num_kv_heads) {
        const int kept = kEarly ? nt : 0;
        if (!kEarly) find_angle(kept, i, tile, row, token);
        rotate(lo, hi, cosine[kept][i], sine[kept][i]);
      }
      if (head < num_heads) {
        out = q + (static_cast<int64_t>(token) * num_heads + head) * HEAD_DIM;
      } else {
        const int2 at = position_and_place(token);
        if (at.y < 0) return;
        const bool is_key = head < num_heads + num_kv_heads;
        const int kv_head = head - num_heads - (is_key ? 0 : num_kv_heads);
        const int page = at.y / kPageTokens;
        out = (is_key ? k_pages : v_pages) +
              ((static_cast<int64_t>(page) * num_kv_heads + kv_head) * kPageTokens + at.y % kPageTokens) * HEAD_DIM;
      }
    }
    out[d] = from_float(lo);
    out[d + kHalf] = from_float(hi);
  }
};
#endif

// Tiles of a residual product: 16 consecutive rows.
struct ConsecutiveTiles {
  int num_tiles, num_groups;
  DEVICE int lo(int tile, int row) const { return tile * 16 + row; }
  DEVICE int hi(int tile, int row) const { return tile * 16 + 8 + row; }
};

// x += scale * (sum + bias), rounded once.
template <int NT, int PAIRS>
struct ResidualEpilogue {
  scalar_t* x;
  const scalar_t* bias;
  int N;
  float scale;
  scalar_t before[NT][PAIRS][2];

  DEVICE void settle() const {}
  DEVICE void prefetch(int nt, int i, int tile, int row, int token) {
    const scalar_t* from = x + static_cast<int64_t>(token) * N + tile * 16 + row;
    before[nt][i][0] = from[0];
    before[nt][i][1] = from[8];
  }
  DEVICE void store(int nt, int i, int tile, int row, int token, float lo, float hi) {
    const int column = tile * 16 + row;
    if (bias != nullptr) lo = biased(lo, bias[column]), hi = biased(hi, bias[column + 8]);
    scalar_t* out = x + static_cast<int64_t>(token) * N + column;
    out[0] = from_float(fmaf(scale, lo, to_float(before[nt][i][0])));
    out[8] = from_float(fmaf(scale, hi, to_float(before[nt][i][1])));
  }
};

// Tiles of gate_up: eight gate rows (lo) and the matching up rows (hi).
struct GateUpTiles {
  int num_tiles, num_groups, F;
  DEVICE int lo(int tile, int row) const { return tile * 8 + row; }
  DEVICE int hi(int tile, int row) const { return F + tile * 8 + row; }
};

// out = activation(gate) * up, rounded once.
struct GateUpEpilogue {
  scalar_t* out;
  int F;
  unsigned char* prepared;   // only linear_packed.cu with FEEDS writes it: the same rows as the next product reads them

  DEVICE static scalar_t value(float gate, float up) { return from_float(gated(gate, up)); }
  DEVICE void settle() const {}
  DEVICE void prefetch(int, int, int, int, int) {}
  DEVICE void store(int, int, int tile, int row, int token, float gate, float up) {
    out[static_cast<int64_t>(token) * F + tile * 8 + row] = value(gate, up);
  }
};

// Tiles of the head. The last one may reach past V: it reads the last row in place of rows that do not exist, and stores nothing of them.
struct HeadTiles {
  int num_tiles, num_groups, V;
  DEVICE int lo(int tile, int row) const { return min(tile * 16 + row, V - 1); }
  DEVICE int hi(int tile, int row) const { return min(tile * 16 + 8 + row, V - 1); }
};

// logits = sum / divisor, float32.
struct HeadEpilogue {
  float* logits;
  int V;
  float divisor;

  DEVICE void settle() const {}
  DEVICE void prefetch(int, int, int, int, int) {}
  DEVICE void store(int, int, int tile, int row, int token, float lo, float hi) {
    const int first = tile * 16 + row;
    float* out = logits + static_cast<int64_t>(token) * V + first;
    if (first < V) out[0] = lo / divisor;
    if (first + 8 < V) out[8] = hi / divisor;
  }
};

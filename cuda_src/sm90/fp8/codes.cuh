// This header says how Hopper's forward kernel on e4m3 codes multiplies, and what scales do there. Codes lie in shared
// memory as TMA writes them: a tile is panels of 128 columns, each with its rows one after the other in the 128-byte
// swizzle. wgmma takes codes only where the depth of the product is contiguous. That of scores is so in memory; for
// that of weights and values the loading warpgroup transposes values (values.cuh).
//
// Weights are rounded to e4m3 in multiples of 2^-8, against the running maximum, so the largest is exact and weights
// down to 2^-14 of it have all bits of e4m3. Keys are visited from the last on: a sink at the first key then does not
// push the weights of others below the least code.
#include "../../around/scales.cuh"
#include "../forward/epilogue.cuh"
#include "../../fragment/softmax_fragment.cuh"

constexpr int CODE_STEP = 32;              // depth of a product of codes
constexpr int CODE_PANEL = SWIZZLE_BYTES;  // columns of a panel of codes
constexpr int CODE_PANELS = (HEAD_DIM + CODE_PANEL - 1) / CODE_PANEL;
constexpr int CODE_PANELS_V = (HEAD_DIM_V + CODE_PANEL - 1) / CODE_PANEL;
constexpr u32 QUERY_CODES_BYTES = BLOCK_M * ROW_BYTES * CODE_PANELS,
              KEY_CODES_BYTES = BLOCK_N * ROW_BYTES * CODE_PANELS;
// Values lie twice in shared memory: (CODE_PANELS_V, BLOCK_N, 128) as they come, and transposed (HEAD_DIM_V, 128), of
// whose columns the first BLOCK_N are keys in the order of key_place().
constexpr u32 VALUE_CODES_BYTES = BLOCK_N * ROW_BYTES * CODE_PANELS_V, COLUMN_CODES_BYTES = HEAD_DIM_V * ROW_BYTES;
// A product with values has SLICE columns at a time. The tensor cores keep fewer bits of a sum than float32 has, so
// that a sum lasts for KEYS_OF_SUM keys at most and is then added to the result in float32. Where a product has all
// columns, the result lies in shared memory meanwhile. Where that would take too many registers (IN_SLICES), it stays
// in registers, and the sums of a slice last for one tile.
constexpr int SLICES = HEAD_DIM_V / SLICE;
constexpr bool IN_SLICES = SLICES > 1;
constexpr int SLICES_AT_ONCE = 2;  // products with so many slices are under way together, but for the last one
constexpr int KEYS_OF_SUM = 512, TILES_OF_SUM = KEYS_OF_SUM / BLOCK_N;
static_assert(BLOCK_N % CODE_STEP == 0 && BLOCK_N <= CODE_PANEL,
              "a tile of keys is one panel of the transposed values");
static_assert(HEAD_DIM % CODE_STEP == 0 && HEAD_DIM_V % SLICE == 0 && SLICE % 16 == 0, "whole steps and slices");
static_assert(TEAMS == 1 && PAIR == 1 && !PACKS_HEADS && !HAS_BIAS_TILES && !HAS_MASK_TILES && !HAS_PAGES,
              "plain tiles");

// key_place() is where a key stands in a row of transposed values: of each 16 keys, 2 t, 2 t + 1, 2 t + 8 and 2 t + 9
// are neighbours, because a lane has the weights of these four.
DEVICE int key_place(int key) {
  const int own = key % 16;
  return key / 16 * 16 + own % 8 / 2 * 4 + own / 8 * 2 + own % 2;
}
// column_address() is where 16 keys of a column begin, counted from the tile's first byte.
DEVICE u32 column_address(int column, int sixteen) { return column * ROW_BYTES + ((sixteen ^ column % 8) * 16); }

// multiply_queries() starts x = Q K^T for 64 queries.
DEVICE void multiply_queries(float (&x)[BLOCK_N / 2], u32 queries, u32 keys) {
  const u64 left = rows_descriptor(queries), right = rows_descriptor(keys);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < HEAD_DIM / CODE_STEP; step++) {
    ptx::wgmma_e4m3_ss(x, left + step_offset(step, BLOCK_M) / 16, right + step_offset(step, BLOCK_N) / 16, step > 0);
  }
  ptx::wgmma_commit_group();
}

// multiply_weights() starts sum = P V for a slice of the columns, or adds the product to the sum (`adds`).
template <int N>
DEVICE void multiply_weights(float (&sum)[N], const u32 (&weights)[BLOCK_N / 8], u32 columns, int slice,
                             bool adds = false) {
  const u64 right = rows_descriptor(columns + slice * SLICE * ROW_BYTES);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < BLOCK_N / CODE_STEP; step++) {
    const u32* w = weights + 4 * step;
    ptx::wgmma_e4m3_rs(sum, w[0], w[1], w[2], w[3], right + step_offset(step, 0) / 16, adds || step > 0);
  }
  ptx::wgmma_commit_group();
}

// pack_codes() rounds weights to codes, the left factor of the next product (key_place()).
DEVICE void pack_codes(u32 (&codes)[BLOCK_N / 8], const float (&x)[BLOCK_N / 2]) {
#pragma unroll
  for (int i = 0; i < BLOCK_N / 8; i++) {
    const int e = i / 2 * 8 + i % 2 * 2;
    codes[i] = ptx::e4m3_of(x[e], x[e + 1], x[e + 4], x[e + 5]);
  }
}

// ---- Softmax

constexpr float WEIGHT_BITS = 8, WEIGHT_FACTOR = 256;  // a weight stands for WEIGHT_FACTOR times itself, 2^WEIGHT_BITS

// FOLDS_ROWS: plain scores take the scales of single queries with the scale of the softmax. UNIT_ROWS is how many of a
// thread's rows then have a unit of their own.
constexpr bool FOLDS_ROWS = PLAIN_SCORES && TOKEN_SCALES;
constexpr int UNIT_ROWS = FOLDS_ROWS ? 2 : 1;

// BIT_ROWS: where keys may be hidden from everybody, their scales must not matter, and each row finds the largest scale
// of the values that it sees; else a tile's rows share one.
constexpr int BIT_ROWS = TOKEN_SCALES && HIDES_ANYWHERE ? 2 : 1;

// CodeSoftmax is the state of a thread's two rows. A row's reference is always its maximum so far.
struct CodeSoftmax {
  float to_base_2[UNIT_ROWS];  // the factors that bring scores to base 2
  float to_natural;            // that to natural units, where the rows share it
  float reference[2], sum[2];  // the largest score, and this thread's share of the sum of weights
  float bits[BIT_ROWS];        // weights of the last tile stand for 2^bits times themselves

  static DEVICE float base(float reference) { return reference == -infinity() ? 0 : reference; }

  DEVICE explicit CodeSoftmax(const float (&units)[UNIT_ROWS]) {
#pragma unroll
    for (int i = 0; i < UNIT_ROWS; i++) to_base_2[i] = units[i] * LOG2_E;
    to_natural = units[0];
    reference[0] = reference[1] = -infinity();
    sum[0] = sum[1] = 0;
    bits[0] = bits[BIT_ROWS - 1] = WEIGHT_BITS;
  }

  // follow() finds the references of a tile of scores, whose weights are to stand for 2^tile_bits times themselves.
  // Earlier results of row r are to be multiplied by rescale[r]; it tells whether some factor of the warp may not be 1.
  DEVICE bool follow(const float (&x)[BLOCK_N / 2], float (&rescale)[2], const float (&tile_bits)[BIT_ROWS]) {
    float top[2];
    FragmentSoftmax::find_tops(x, top);
    rescale[0] = rescale[1] = 1;
    const bool grows = TOKEN_SCALES || __any_sync(ALL_LANES, top[0] > reference[0] || top[1] > reference[1]);
    if (grows) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float grown = larger(reference[r], max_of_row<4>(top[r]));
        const float shrinks = (reference[r] - base(grown)) * to_base_2[r % UNIT_ROWS];
        rescale[r] = ptx::ex2(TOKEN_SCALES ? shrinks + (tile_bits[r % BIT_ROWS] - bits[r % BIT_ROWS]) : shrinks);
        reference[r] = grown;
        sum[r] *= rescale[r];
      }
    }
    bits[0] = tile_bits[0];
    bits[BIT_ROWS - 1] = tile_bits[BIT_ROWS - 1];
    return grows;
  }

  // weigh() turns the scores of a tile into weights, and adds these to the sums.
  DEVICE void weigh(float (&x)[BLOCK_N / 2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float unit = to_base_2[r % UNIT_ROWS], own_bits = bits[r % BIT_ROWS], own_base = base(reference[r]);
      const float offset = own_bits - own_base * unit;
      float row_sum = 0;
#pragma unroll
      for (int e = 2 * r; e < BLOCK_N / 2; e += 4) {
#pragma unroll
        for (int side = 0; side < 2; side++) {
          float& w = x[e + side];
          w = ptx::ex2(ANY_SCORES ? (w - own_base) * LOG2_E + own_bits : w * unit + offset);
          row_sum += w;
        }
      }
      sum[r] += row_sum;
    }
  }

  // finish() ends both rows: inverse[r] normalises row r, lse[r] is its natural log-sum-exp.
  DEVICE void finish(float sink, float (&inverse)[2], float (&lse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float total = TOKEN_SCALES ? sum[r] * ptx::ex2(-bits[r % BIT_ROWS]) : sum[r] / WEIGHT_FACTOR;
      const float natural = FOLDS_ROWS ? to_base_2[r % UNIT_ROWS] / LOG2_E : to_natural;
      finish_row(reference[r] * natural, total, sink, inverse[r], lse[r]);
    }
  }
};

// ---- Scales

// FOLDS_SCALES: where all rows of a head share their scales, plain scores take them with the scale of the softmax.
constexpr bool FOLDS_SCALES = PLAIN_SCORES && !TOKEN_SCALES;

// ScoreScales are what products are multiplied by: `factor`, or with TOKEN_SCALES numbers of the thread's two rows and
// of each key. `scale` is then the scale of the softmax.
struct ScoreScales {
  float scale, factor = 1;
  float2& of_rows;               // in shared memory: registers are scarce
  bool has_rows = TOKEN_SCALES;  // products are multiplied by of_rows; else the softmax does it

  DEVICE ScoreScales(const AttentionParams& p, const Sequence& s, int head, int row, float2& of_rows)
      : scale(static_cast<float>(p.softmax_scale)), of_rows(of_rows) {
    const i64 batch = batch_of(p, s);
    if constexpr (TOKEN_SCALES) {
      const auto of_row = [&](int i) { return i < s.len_q ? scale_at(p.q_scale, batch, s.row_q + i, head) : 1; };
      of_rows = {of_row(row), of_row(row + 8)};
      if (FOLDS_ROWS) has_rows = !is_usual(scale * of_rows.x) || !is_usual(scale * of_rows.y);
    } else if (s.len_k > 0 && s.len_q > 0) {
      // Nothing is read where there are no keys, of which there may be no scale either.
      factor = scale_at(p.q_scale, batch, 0, head) * scale_at(p.k_scale, batch, 0, head / group_size(p));
      const float both = scale * factor;
      if (FOLDS_SCALES && is_usual(both)) scale = both, factor = 1;
    }
  }

  // units() are the factors that bring the softmax's scores to natural units, of which `unit` is the one of all rows.
  DEVICE void units(float (&found)[UNIT_ROWS], float unit) const {
#pragma unroll
    for (int r = 0; r < UNIT_ROWS; r++) {
      found[r] = FOLDS_ROWS && !has_rows ? unit * (r == 0 ? of_rows.x : of_rows.y) : unit;
    }
  }

  // apply() multiplies products; of_keys are the scales of the tile's keys in shared memory.
  DEVICE void apply(float (&x)[BLOCK_N / 2], const float* of_keys) const {
    if constexpr (TOKEN_SCALES) {
#pragma unroll
      for (int e = 0; e < BLOCK_N / 2; e += 4) {
        const float2 keys = *reinterpret_cast<const float2*>(of_keys + fragment_column() + column_offset(e));
#pragma unroll
        for (int i = 0; i < 4; i++) x[e + i] *= i % 2 == 0 ? keys.x : keys.y;
      }
      if (has_rows) {
        const float rows[2] = {of_rows.x, of_rows.y};
        rescale_rows(x, rows);
      }
    } else if (factor != 1) {
#pragma unroll
      for (int e = 0; e < BLOCK_N / 2; e++) x[e] *= factor;
    }
  }
};

// WeightScales are what weights are multiplied by before they are rounded, besides 2^WEIGHT_BITS: with TOKEN_SCALES
// their values' scales over the largest of the tile, or of those that a row sees. Softmax divides by the largest, with
// the exponents; since sums of weights stand for as many times themselves, it does not show in results.
struct WeightScales {
  // The largest scale of a tile counts as no less than the first of these, so that weights over it are finite, and than
  // the second times that of an earlier tile, so that results are.
  static constexpr float LEAST = 0x1p-90f, LEAST_BEHIND = 0x1p-80f;
  float of_all = 1;      // without TOKEN_SCALES: the scale of all values
  float most[BIT_ROWS];  // with BIT_ROWS 2: the largest scale that a row has seen

  DEVICE WeightScales(const AttentionParams& p, const Sequence& s, int head) {
    most[0] = most[BIT_ROWS - 1] = LEAST;
    if (!TOKEN_SCALES && s.len_k > 0) of_all = scale_at(p.v_scale, batch_of(p, s), 0, head / group_size(p));
  }

  // find_bits() finds those of weights in a tile of scores x; `top` is the largest scale of its keys in use.
  DEVICE void find_bits(float (&bits)[BIT_ROWS], const float (&x)[BLOCK_N / 2], const float* of_values, float top) {
    if constexpr (!TOKEN_SCALES) {
      bits[0] = WEIGHT_BITS;
    } else if constexpr (BIT_ROWS == 1) {
      bits[0] = WEIGHT_BITS - ptx::lg2(top);
    } else {
      float tops[2] = {0, 0};
#pragma unroll
      for (int e = 0; e < BLOCK_N / 2; e += 4) {
        const float2 scale = *reinterpret_cast<const float2*>(of_values + fragment_column() + column_offset(e));
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float own = x[e + i] == -infinity() ? 0 : fabsf(i % 2 == 0 ? scale.x : scale.y);
          tops[i / 2] = larger(tops[i / 2], own);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; r++)
        bits[r % BIT_ROWS] = WEIGHT_BITS - ptx::lg2(follow(max_of_row<4>(tops[r]), most[r % BIT_ROWS]));
    }
  }

  // follow() is the largest scale that counts for a tile, behind tiles whose largest was `most`.
  static DEVICE float follow(float top, float& most) {
    const float own = larger(top, most * LEAST_BEHIND);
    most = larger(most, own);
    return larger(own, LEAST);
  }

  // apply() multiplies weights by the scales of their values; where keys are hidden (`masked`), theirs may be anything.
  DEVICE void apply(float (&x)[BLOCK_N / 2], const float* of_values, bool masked) const {
    if constexpr (TOKEN_SCALES) {
      if (masked) {
        multiply<true>(x, of_values);
      } else {
        multiply<false>(x, of_values);
      }
    }
  }

  // take() multiplies the factors of a row's results by what a code 1 stands for; a row that saw nothing has the
  // factor 0.
  DEVICE void take(float (&factor)[2], const float (&bits)[BIT_ROWS]) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float unit = TOKEN_SCALES ? ptx::ex2(-bits[r % BIT_ROWS]) : of_all / WEIGHT_FACTOR;
      factor[r] = factor[r] == 0 ? 0 : factor[r] * unit;
    }
  }

 private:
  template <bool MASKED>
  static DEVICE void multiply(float (&x)[BLOCK_N / 2], const float* of_values) {
#pragma unroll
    for (int e = 0; e < BLOCK_N / 2; e += 4) {
      const float2 scale = *reinterpret_cast<const float2*>(of_values + fragment_column() + column_offset(e));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float own = i % 2 == 0 ? scale.x : scale.y;
        x[e + i] = MASKED && x[e + i] == 0 ? 0 : x[e + i] * own;
      }
    }
  }
};

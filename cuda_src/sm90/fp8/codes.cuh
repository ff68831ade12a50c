// This header says how Hopper's forward kernel on e4m3 codes multiplies, and what scales do there. Codes lie in shared
// memory as TMA writes them: a tile is panels of 128 columns, each with its rows one after the other in the 128-byte
// swizzle. wgmma takes codes only where the depth of the product is contiguous. That of scores is so in memory; for
// that of weights and values the loading warpgroup transposes values (values.cuh).
//
// Weights are rounded to e4m3 in multiples of 2^-8, against the running maximum, so the largest is exact and weights
// down to 2^-14 of it have all bits of e4m3. Keys are visited from the last on: a sink at the first key then does not
// push the weights of others below the least code.
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
// A product with values has SLICE columns at a time. Its sum lasts for one tile of keys and is then added to the
// result in float32, because the tensor cores keep fewer bits; all columns at once would take too many registers.
constexpr int SLICES = HEAD_DIM_V / SLICE;
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

// multiply_weights() starts sum = P V for a slice of the columns.
DEVICE void multiply_weights(float (&sum)[SLICE / 2], const u32 (&weights)[BLOCK_N / 8], u32 columns, int slice) {
  const u64 right = rows_descriptor(columns + slice * SLICE * ROW_BYTES);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < BLOCK_N / CODE_STEP; step++) {
    const u32* w = weights + 4 * step;
    ptx::wgmma_e4m3_rs(sum, w[0], w[1], w[2], w[3], right + step_offset(step, 0) / 16, step > 0);
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

// CodeSoftmax is the state of a thread's two rows. A row's reference is always its maximum so far.
struct CodeSoftmax {
  float to_natural, to_base_2;  // factors that bring a score to natural units, and to base 2
  float reference[2], sum[2];   // the largest score, and this thread's share of the sum of weights

  DEVICE explicit CodeSoftmax(float unit) : to_natural(unit), to_base_2(unit * LOG2_E) {
    reference[0] = reference[1] = -infinity();
    sum[0] = sum[1] = 0;
  }

  // step() turns the scores of a tile into weights; earlier results of row r are to be multiplied by rescale[r].
  DEVICE void step(float (&x)[BLOCK_N / 2], float (&rescale)[2]) {
    float top[2];
    FragmentSoftmax::find_tops(x, top);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float grown = larger(reference[r], max_of_row<4>(top[r])), base = grown == -infinity() ? 0 : grown;
      rescale[r] = ptx::ex2((reference[r] - base) * to_base_2);
      reference[r] = grown;
      const float offset = WEIGHT_BITS - base * to_base_2;
      float row_sum = 0;
#pragma unroll
      for (int e = 2 * r; e < BLOCK_N / 2; e += 4) {
#pragma unroll
        for (int side = 0; side < 2; side++) {
          float& w = x[e + side];
          w = ptx::ex2(ANY_SCORES ? (w - base) * LOG2_E + WEIGHT_BITS : w * to_base_2 + offset);
          row_sum += w;
        }
      }
      sum[r] = sum[r] * rescale[r] + row_sum;
    }
  }

  // finish() ends both rows: inverse[r] normalises row r, lse[r] is its natural log-sum-exp.
  DEVICE void finish(float sink, float (&inverse)[2], float (&lse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      finish_row(reference[r] * to_natural, sum[r] / WEIGHT_FACTOR, sink, inverse[r], lse[r]);
    }
  }
};

// ---- Scales

// scale_at() is the scale of a row of codes; without scales all are 1.
DEVICE float scale_at(const Tensor<const float>& scale, i64 batch, i64 row, int head) {
  return scale.data == nullptr ? 1.0f : *scale.at(batch, row, head);
}

// FOLDS_SCALES: where all rows of a head share their scales, plain scores take them with the scale of the softmax.
constexpr bool FOLDS_SCALES = PLAIN_SCORES && !TOKEN_SCALES;

// ScoreScales are what products are multiplied by: `factor`, or with TOKEN_SCALES numbers of the thread's two rows and
// of each key. `scale` is then the scale of the softmax.
struct ScoreScales {
  float scale, factor;
  float of_rows[TOKEN_SCALES ? 2 : 1];

  DEVICE ScoreScales(const AttentionParams& p, const Sequence& s, int head, int row) {
    scale = static_cast<float>(p.softmax_scale);
    factor = 1;
    const i64 batch = batch_of(p, s);
    if constexpr (TOKEN_SCALES) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int i = row + 8 * r;
        of_rows[r] = i < s.len_q ? scale_at(p.q_scale, batch, s.row_q + i, head) : 1;
      }
    } else {
      // Nothing is read where there are no keys, of which there may be no scale either.
      if (s.len_k > 0 && s.len_q > 0) {
        factor = scale_at(p.q_scale, batch, 0, head) * scale_at(p.k_scale, batch, 0, head / group_size(p));
      }
      const float both = scale * factor;
      if (FOLDS_SCALES && both > 0x1p-80f && both < 0x1p80f) scale = both, factor = 1;
    }
  }

  // apply() multiplies products; of_keys are the scales of the tile's keys in shared memory.
  DEVICE void apply(float (&x)[BLOCK_N / 2], const float* of_keys) const {
    if constexpr (TOKEN_SCALES) {
#pragma unroll
      for (int e = 0; e < BLOCK_N / 2; e += 4) {
        const float2 keys = *reinterpret_cast<const float2*>(of_keys + fragment_column() + column_offset(e));
#pragma unroll
        for (int i = 0; i < 4; i++) x[e + i] *= (i % 2 == 0 ? keys.x : keys.y) * of_rows[TOKEN_SCALES ? i / 2 : 0];
      }
    } else if (factor != 1) {
#pragma unroll
      for (int e = 0; e < BLOCK_N / 2; e++) x[e] *= factor;
    }
  }
};

// WeightUnits are the units of a thread's two rows: a sum of weights times values is a number of them. Where scales of
// values differ, a row's unit is its largest weight times scale so far, so that this one is exact. Else it is the
// scale.
struct WeightUnits {
  static constexpr float LEAST = 0x1p-100f;  // the least unit, whose inverse is finite
  float unit[TOKEN_SCALES ? 2 : 1];

  DEVICE WeightUnits(const AttentionParams& p, const Sequence& s, int head) {
    if constexpr (TOKEN_SCALES) {
      unit[0] = unit[TOKEN_SCALES] = LEAST;
    } else {
      unit[0] = s.len_k > 0 ? scale_at(p.v_scale, batch_of(p, s), 0, head / group_size(p)) : 1;
    }
  }

  // apply() multiplies weights by the scales of their values, puts them into units, and adapts rescale.
  DEVICE void apply(float (&x)[BLOCK_N / 2], const float* of_values, float (&rescale)[2]) {
    if constexpr (TOKEN_SCALES) {
      float top[2] = {0, 0}, inverse[2];
#pragma unroll
      for (int e = 0; e < BLOCK_N / 2; e += 4) {
        const float2 scale = *reinterpret_cast<const float2*>(of_values + fragment_column() + column_offset(e));
#pragma unroll
        for (int i = 0; i < 4; i++) {
          // The scale of a key without weight may be anything.
          x[e + i] = x[e + i] == 0 ? 0 : x[e + i] * (i % 2 == 0 ? scale.x : scale.y);
          top[i / 2] = larger(top[i / 2], fabsf(x[e + i]));
        }
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float earlier = rescale[r] * unit[r % (TOKEN_SCALES + 1)];
        const float own = larger(larger(max_of_row<4>(top[r]) / WEIGHT_FACTOR, earlier), LEAST);
        unit[r % (TOKEN_SCALES + 1)] = own;
        inverse[r] = quotient(1, own);
        rescale[r] = earlier * inverse[r];
      }
      rescale_rows(x, inverse);
    }
  }

  // take() multiplies the factors of a row's results by its unit; a row that saw nothing has the factor 0.
  DEVICE void take(float (&factor)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      factor[r] = factor[r] == 0 ? 0 : factor[r] * (unit[r % (TOKEN_SCALES + 1)] / WEIGHT_FACTOR);
    }
  }
};

// This header computes the weights P and gradients dS of one tile for the portable gradient kernels: FlashAttention-2
// (Dao 2023), Algorithm 2, lines 10 to 14. portable/backward_dq.cu, portable/backward_dkv.cu and
// portable/bias_gradient.cuh differ only in which tiles they visit and which sums they keep; dropout and the
// derivatives of scores are applied here.
#include "tile.cuh"
#include "../fragment/softmax.cuh"

// TileDerivatives holds the derivatives of scores before the user's own rule, for a tile (ROWS, COLUMNS). Those of the
// rule are applied by compute(), as the operands' gradients want what is before it.
template <int ROWS, int COLUMNS>
struct TileDerivatives {
  rules::ScoreDerivatives<COLUMNS> rows[ROWS];

  DEVICE void differentiate_cap(Accum (&ds)[ROWS][COLUMNS]) const {
#pragma unroll
    for (int r = 0; r < ROWS; r++) rows[r].differentiate_cap(ds[r]);
  }
};

// RuleTile holds the scores of a tile that the user's own rule is given, at which its derivatives are taken.
template <int ROWS, int COLUMNS>
struct RuleTile {
  Accum x[HAS_SCORE_MOD ? ROWS : 1][HAS_SCORE_MOD ? COLUMNS : 1];

  DEVICE Accum at(int r, int c) const { return HAS_SCORE_MOD ? x[HAS_SCORE_MOD ? r : 0][HAS_SCORE_MOD ? c : 0] : 0; }
};

// NoTerms takes the terms of compute() where no operand's gradient is wanted, and does nothing.
struct NoTerms {
  DEVICE void operator()(const Score& score, Accum before, Accum ds, int i, int j) {}
};

// GradientTile is one (sequence, query head) as the gradient kernels read it. Tiles are keys x queries with TRANSPOSED,
// else queries x keys.
template <bool TRANSPOSED>
struct GradientTile {
  Rows q, k, v, dout;  // (len_q, head_dim), (len_k, head_dim), (len_k, head_dim_v), (len_q, head_dim_v)
  Score score;
  Mask mask;
  const AttentionParams& p;  // kept because what dropout needs is read again: registers are scarce
  const Sequence& s;
  int head;
  const Accum *lse, *delta;  // (len_q,) each
  i64 lse_stride, delta_stride;
  int len_q;

  DEVICE GradientTile(const AttentionParams& p, const Sequence& s, int head, int head_kv)
      : GradientTile(p, s, head, head_kv, batch_of(p, s)) {}

  DEVICE GradientTile(const AttentionParams& p, const Sequence& s, int head, int head_kv, i64 batch)
      : q(p.q.at(batch, s.row_q, head), p.q.row_stride, s.len_q, p.head_dim),
        k(p.k.at(batch, s.row_k, head_kv), p.k.row_stride, s.len_k, p.head_dim),
        v(p.v.at(batch, s.row_k, head_kv), p.v.row_stride, s.len_k, p.head_dim_v),
        dout(p.dout.at(batch, s.row_q, head), p.dout.row_stride, s.len_q, p.head_dim_v),
        score(p, s, head),
        mask(p, s, head),
        p(p),
        s(s),
        head(head),
        lse(p.lse.at(batch, s.row_q, head)),
        delta(p.delta.at(batch, s.row_q, head)),
        lse_stride(p.lse.row_stride),
        delta_stride(p.delta.row_stride),
        len_q(s.len_q) {}

  template <int A, int B>
  DEVICE void fetch(ChunkPair<A, B>& chunks, int first_row, int first_column) const {
    chunks.fetch(TRANSPOSED ? k : q, first_row, TRANSPOSED ? q : k, first_column, 0);
  }

  // compute() finds the weights and gradients of one tile. `dropped` becomes P after dropout, not rescaled, for dv;
  // `ds` becomes the gradient of the scores before the user's own rule, from which `derivatives` makes the gradient of
  // the products; `terms` is called with the gradient of each score behind the rule. The caller has cleared `seen`,
  // which is complete behind the next barrier if masked, and has called fetch(); `next` starts to fetch the operands
  // that follow.
  template <int SIZE, int ROWS, int COLUMNS, class Next, class Terms = NoTerms>
  DEVICE void compute(Accum (&dropped)[ROWS][COLUMNS], Accum (&ds)[ROWS][COLUMNS],
                      TileDerivatives<ROWS, COLUMNS>& derivatives, Buffers<SIZE>& buffers,
                      ChunkPair<ROWS * SIDE, COLUMNS * SIDE>& chunks, int first_row, int first_column, bool masked,
                      u8* seen, Next next, Terms&& terms = Terms()) const {
    clear(dropped);
    clear(ds);
    const Rows &left = TRANSPOSED ? v : dout, &right = TRANSPOSED ? dout : v;
    multiply_transposed(dropped, buffers, chunks, TRANSPOSED ? k : q, first_row, TRANSPOSED ? q : k, first_column,
                        [&] { chunks.fetch(left, first_row, right, first_column, 0); });
    multiply_transposed(ds, buffers, chunks, left, first_row, right, first_column, next);

#pragma unroll
    for (int r = 0; r < ROWS; r++) derivatives.rows[r].take_cap(score, dropped[r]);
    const auto query_at = [&](int r, int c) {
      return TRANSPOSED ? first_column + owned_index<COLUMNS>(thread_column(), c)
                        : first_row + owned_index<ROWS>(thread_row(), r);
    };
    const auto key_at = [&](int r, int c) {
      return TRANSPOSED ? first_row + owned_index<ROWS>(thread_row(), r)
                        : first_column + owned_index<COLUMNS>(thread_column(), c);
    };
    RuleTile<ROWS, COLUMNS> before;
    if constexpr (HAS_SCORE_MOD) {
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
          before.x[r][c] = score.before_rule(dropped[r][c], query_at(r, c), key_at(r, c));
      }
    }
    score_tile<TRANSPOSED>(dropped, score, mask, first_row, first_column, masked, seen);
    // Each query has its lse and delta. Rows beyond the sequence and rows that saw nothing have no weights.
    constexpr int QUERIES = TRANSPOSED ? COLUMNS : ROWS;
    Accum reference[QUERIES], own_delta[QUERIES];
#pragma unroll
    for (int e = 0; e < QUERIES; e++) {
      const int i = TRANSPOSED ? first_column + owned_index<QUERIES>(thread_column(), e)
                               : first_row + owned_index<QUERIES>(thread_row(), e);
      const Accum value = i < len_q ? lse[i * lse_stride] : -infinity();
      reference[e] = value == -infinity() ? infinity() : value;
      own_delta[e] = i < len_q ? delta[i * delta_stride] : Accum(0);
    }
    const Accum rescale = static_cast<Accum>(p.dropout_rescale);
    const auto finish = [&](int r, int c, bool kept) {
      const int e = TRANSPOSED ? c : r;
      const Accum w = reference[e] == infinity() ? Accum(0) : weight(dropped[r][c], reference[e]);
      const Accum dp = !HAS_DROPOUT ? ds[r][c] : kept ? ds[r][c] * rescale : Accum(0);
      // A hidden element's dP may be NaN.
      ds[r][c] = w == 0 ? Accum(0) : w * (dp - own_delta[e]);
      if constexpr (HAS_SCORE_MOD) {
        const int i = query_at(r, c), j = key_at(r, c);
        if (ds[r][c] != 0) {
          terms(score, before.at(r, c), ds[r][c], i, j);
          ds[r][c] *= score.user.derivative(before.at(r, c), i, j);
        }
      }
      dropped[r][c] = kept ? w : Accum(0);
    };
    if constexpr (HAS_DROPOUT) {
      for_each_kept<TRANSPOSED, ROWS, COLUMNS>(Dropout(p, s, head), first_row, first_column, finish);
    } else {
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) finish(r, c, true);
      }
    }
  }
};

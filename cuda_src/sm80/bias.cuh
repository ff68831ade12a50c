// This header computes the gradient of a bias by mma.sync, for every dtype that tensor cores multiply. BiasGradient
// computes dS of one tile of scores and sums it; around/bias_range.cuh has the kernel, which includes this header as
// `gradient` and visits the tiles that one tile of the bias was added to. A warp has FRAGMENTS * 16 queries of each
// tile. `products` (half_tile.cuh, wide_tile.cuh or split/sm80_tile.cuh) says how to multiply.
#include "products"
#include "../fragment/score_gradient.cuh"
#include "../fragment/softmax.cuh"

constexpr int FRAGMENT = BLOCK_N / KEY_WARPS / 2;  // elements of a thread's fragment
using Scores = ScoreGradient<false, FRAGMENT>;
constexpr int FRAGMENTS = BLOCK_M / (NUM_WARPS * 16);
static_assert(BLOCK_M == FRAGMENTS * NUM_WARPS * 16, "whole fragments");
// IN_CHUNKS: with more than one stage the operands come in chunks of columns, those of q and k and then in their place
// those of dout and v, so that wide elements and wide heads fit shared memory.
constexpr bool IN_CHUNKS = STAGES > 1;
constexpr int KEYED_CHUNKS = IN_CHUNKS ? HEAD_DIM / CHUNK : 1, VALUED_CHUNKS = IN_CHUNKS ? HEAD_DIM_V / CHUNK : 1;
using QueryTile = KeyedTile<BLOCK_M, HEAD_DIM / KEYED_CHUNKS>;
using DoutTile = ValuedTile<BLOCK_M, HEAD_DIM_V / VALUED_CHUNKS>;
using KeyTile = KeyedTile<BLOCK_N, HEAD_DIM / KEYED_CHUNKS>;
using ValueTile = ValuedTile<BLOCK_N, HEAD_DIM_V / VALUED_CHUNKS>;
constexpr u32 DOUT_AT = QueryTile::BYTES, KEYS_AT = DOUT_AT + DoutTile::BYTES, VALUES_AT = KEYS_AT + KeyTile::BYTES;
constexpr int CHUNKS = KEYED_CHUNKS + VALUED_CHUNKS;
constexpr u32 CHUNK_BYTES = QueryTile::BYTES + KeyTile::BYTES;
static_assert(QueryTile::BYTES >= DoutTile::BYTES, "dout and v take the place of q and k");

struct SharedStorage {
  alignas(128) unsigned char tiles[IN_CHUNKS ? STAGES * CHUNK_BYTES : VALUES_AT + ValueTile::BYTES];
  Factors<BLOCK_M, 1> row_factors;
  Factors<BLOCK_N, 1> factors;
};

// Loaded tells which rows are in shared memory, so that rows that stay are not loaded again.
struct Loaded {
  int batch = -1, head = 0, first = 0;

  // changes_to() tells whether other rows must be loaded, and notes them.
  DEVICE bool changes_to(int new_batch, int new_head, int new_first) {
    const bool changes = new_batch != batch || new_head != head || new_first != first;
    batch = new_batch, head = new_head, first = new_first;
    return changes;
  }
};

// read_biases() reads the biases of a thread's elements from (row, column) on, in pairs where they are neighbours in
// memory.
DEVICE void read_biases(Accum (&x)[FRAGMENT], const Score& score, int row, int column) {
  struct alignas(2 * sizeof(BiasElement)) Pair {
    BiasElement x, y;
  };
  if (score.bias_column_stride == 1 && column + column_offset(FRAGMENT - 1) <= score.bias_last_column &&
      (reinterpret_cast<u64>(score.bias + column) | score.bias_row_stride * sizeof(BiasElement)) % sizeof(Pair) == 0) {
#pragma unroll
    for (int e = 0; e < FRAGMENT; e += 2) {
      const i64 own = smaller(row + row_offset(e), score.bias_last_row) * score.bias_row_stride;
      const Pair pair = *reinterpret_cast<const Pair*>(score.bias + own + column + column_offset(e));
      x[e] = to_accum(pair.x);
      x[e + 1] = to_accum(pair.y);
    }
  } else {
#pragma unroll
    for (int e = 0; e < FRAGMENT; e++) x[e] = score.bias_at(row + row_offset(e), column + column_offset(e));
  }
}

// TileOperands are the operands of a tile of scores, (len_q, head_dim) and so on, and its first query and key.
struct TileOperands {
  const OperandRows q, k, dout, v;
  const int first_row, first_key;

  // load_chunk() starts to load chunk `i` to its place in shared memory, if there is one.
  DEVICE void load_chunk(u32 tiles, int i) const {
    const u32 at = tiles + i % STAGES * CHUNK_BYTES;
    if (i < KEYED_CHUNKS) {
      QueryTile{at}.load(chunk_of<HEAD_DIM, CHUNK>(q, i), first_row);
      KeyTile{at + QueryTile::BYTES}.load(chunk_of<HEAD_DIM, CHUNK>(k, i), first_key);
    } else if (i < CHUNKS) {
      DoutTile{at}.load(chunk_of<HEAD_DIM_V, CHUNK>(dout, i - KEYED_CHUNKS), first_row);
      ValueTile{at + QueryTile::BYTES}.load(chunk_of<HEAD_DIM_V, CHUNK>(v, i - KEYED_CHUNKS), first_key);
    }
    commit_copies();
  }
};

// BiasGradient sums the gradient of one tile of the bias (BLOCK_M, BLOCK_N).
struct BiasGradient {
  SharedStorage& shared;
  Loaded own_queries, own_keys;
  Accum sum[FRAGMENTS][FRAGMENT];  // the thread's elements of the warp's FRAGMENTS * 16 rows

  DEVICE explicit BiasGradient(SharedStorage& shared) : shared(shared) {
#pragma unroll
    for (auto& x : sum) clear(x);
  }
  static DEVICE int warp_row() { return threadIdx.x / WARP * FRAGMENTS * 16; }

  // multiply_chunks() computes x += rows columns^T by chunks [begin, end), and starts to load a chunk in the place of
  // the one before.
  template <class X, class R, class C>
  DEVICE void multiply_chunks(X& x, R rows, C columns, int begin, int end, const TileOperands& operands) const {
#pragma unroll 1
    for (int i = begin; i < end; i++) {
      wait_for_copies<STAGES - 2>();
      __syncthreads();
      operands.load_chunk(ptx::shared_address(shared.tiles), i + STAGES - 1);
      rows.address = ptx::shared_address(shared.tiles) + i % STAGES * CHUNK_BYTES;
      columns.address = rows.address + QueryTile::BYTES;
      multiply_scores(x, rows.from_row(warp_row()), columns);
    }
  }

  // read_numbers() reads lse and delta of a thread's two rows from `row` on.
  static DEVICE void read_numbers(Accum (&lse)[2], Accum (&delta)[2], const AttentionParams& p, const Sequence& s,
                                  int head, int row) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const i64 batch = batch_of(p, s);
      const i64 own = s.row_q + smaller(row + 8 * r, s.len_q - 1);
      lse[r] = *p.lse.at(batch, own, head);
      delta[r] = *p.delta.at(batch, own, head);
    }
  }

  // find_weights() turns the products of fragment f (`x`) into weights P, by its biases; `derivatives` takes what dS
  // will need of them.
  DEVICE void find_weights(Accum (&x)[FRAGMENT], const Accum (&biases)[FRAGMENT], Scores::Derivatives& derivatives,
                           const Scores& scores, const Accum (&lse)[2], int f, int row, int first_key,
                           bool masked) const {
    take_scores(x, shared.row_factors, warp_row() + 16 * f + fragment_row(), shared.factors, 0);
    scores.take_rule(derivatives, x, row, first_key);
    scores.apply(x, row, first_key, masked, biases);
#pragma unroll
    for (int e = 0; e < FRAGMENT; e++) {
      const Accum reference = lse[e / 2 % 2];
      // A query that sees nothing may have any scores, where others of the tile see something.
      x[e] = reference == -infinity() ? 0 : weight(x[e], reference);
    }
    scores.mark_dropped(x, row, first_key);
  }

  // add_gradients() turns dP of fragment f (`y`) into dS, by its weights, and adds it to the sum.
  DEVICE void add_gradients(Accum (&y)[FRAGMENT], const Accum (&weights)[FRAGMENT], const Accum (&delta)[2],
                            const Scores::Derivatives& derivatives, int f, Accum rescale) {
    take_values(y, shared.row_factors, warp_row() + 16 * f + fragment_row(), shared.factors, 0);
#pragma unroll
    for (int e = 0; e < FRAGMENT; e++) y[e] = score_gradient(y[e], weights[e], delta[e / 2 % 2], rescale);
    derivatives.differentiate_rule(y);
#pragma unroll
    for (int e = 0; e < FRAGMENT; e++) sum[f][e] += y[e];
  }

  // add() adds dS of the tile of scores at (first_row, first_key). A function that loads all operands would change the
  // code that the compiler makes.
  DEVICE void add(const AttentionParams& p, const Sequence& s, int head, int first_row, int first_key) {
    const u32 tiles = ptx::shared_address(shared.tiles);
    const QueryTile queries{tiles};
    const DoutTile douts{tiles + DOUT_AT};
    const KeyTile keys{tiles + KEYS_AT};
    const ValueTile values{tiles + VALUES_AT};
    const int head_kv = head / group_size(p);
    const bool new_queries = own_queries.changes_to(s.batch, head, first_row);
    const bool new_keys = own_keys.changes_to(s.batch, head_kv, first_key);
    const TileOperands operands = {rows_of(p, s, Operand::Q, head),
                                   rows_of(p, s, Operand::K, head_kv),
                                   rows_of(p, s, Operand::DOUT, head),
                                   rows_of(p, s, Operand::V, head_kv),
                                   first_row,
                                   first_key};
    // 1. The operands are loaded, except for rows that stay: chunks in their order, or q and k before dout and v.
    if constexpr (!IN_CHUNKS) {
      if (new_queries) queries.load(operands.q, first_row);
      if (new_keys) keys.load(operands.k, first_key);
    }
    __syncthreads();  // all have read dout, v and factors of the step before; q and k were read at its last barrier
    if (new_queries) shared.row_factors.load(0, operands.q, operands.dout, first_row);
    if (new_keys) shared.factors.load(0, operands.k, operands.v, first_key);
    if constexpr (IN_CHUNKS) {
#pragma unroll
      for (int i = 0; i < STAGES - 1; i++)
        operands.load_chunk(tiles, i);  // the first chunk is committed with the factors
    } else {
      commit_copies();
      if (new_queries) douts.load(operands.dout, first_row);
      if (new_keys) values.load(operands.v, first_key);
      commit_copies();
    }

    // 2. The biases, lse and delta are read meanwhile.
    const Scores scores(p, s, head);
    const bool masked = HAS_MASK || HAS_BLOCK_MASK || HAS_MASK_MOD || first_row + BLOCK_M > s.len_q ||
                        !scores.mask.columns_inside(first_row, BLOCK_M, first_key, BLOCK_N);
    const int own_row = first_row + warp_row() + fragment_row();
    // x is S, then P; y has the biases, then dP, then dS: the warp's queries x the keys.
    Accum x[FRAGMENTS][FRAGMENT], y[FRAGMENTS][FRAGMENT], lse[FRAGMENTS][2], delta[FRAGMENTS][2];
    Scores::Derivatives derivatives[FRAGMENTS];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
      clear(x[f]);
      read_biases(y[f], scores.score, own_row + 16 * f, first_key + fragment_column());
      read_numbers(lse[f], delta[f], p, s, head, own_row + 16 * f);
    }
    // 3. S = Q K^T; from it come the weights P.
    if constexpr (IN_CHUNKS) {
      multiply_chunks(x, queries, keys, 0, KEYED_CHUNKS, operands);
    } else {
      wait_for_copies<1>();
      __syncthreads();
      multiply_scores(x, queries.from_row(warp_row()), keys);
    }
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
      find_weights(x[f], y[f], derivatives[f], scores, lse[f], f, own_row + 16 * f, first_key, masked);
      clear(y[f]);
    }
    // 4. dP = dO V^T; from it comes dS, which is added to the sum.
    if constexpr (IN_CHUNKS) {
      multiply_chunks(y, douts, values, KEYED_CHUNKS, CHUNKS, operands);
    } else {
      finish_copies();
      multiply_scores(y, douts.from_row(warp_row()), values);
    }
    const auto rescale = static_cast<Accum>(p.dropout_rescale);
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) add_gradients(y[f], x[f], delta[f], derivatives[f], f, rescale);
  }

  // store() writes the sums to shared memory, (BLOCK_M, stride).
  DEVICE void store(Accum* sums, int stride) const {
    sums += (warp_row() + fragment_row()) * stride + fragment_column();
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
      for (int e = 0; e < FRAGMENT; e++) {
        sums[(16 * f + row_offset(e)) * stride + column_offset(e)] = sum[f][e];
      }
    }
  }
};

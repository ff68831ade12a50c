// This header has the shared memory of backward.cu, and loads tiles of queries into it.
#include "../fragment/gradient_fragment.cuh"
#include "cluster.cuh"

// DK_COLUMNS and DV_COLUMNS are the columns that a warp has; 32 stands for a result that is not computed, because
// arrays must have a size.
constexpr int KEY_WARPS = NUM_WARPS / QUERY_WARPS, FRAGMENTS = BLOCK_N / (KEY_WARPS * 16);
constexpr int DK_COLUMNS = COMPUTES_DK ? HEAD_DIM / QUERY_WARPS : 32,
              DV_COLUMNS = COMPUTES_DV ? HEAD_DIM_V / QUERY_WARPS : 32;
// INTERLEAVED_TILES is so large that tiles of one head, which add to a tile of queries one after the other, are some
// steps apart.
constexpr u32 INTERLEAVED_TILES = 1024;
// ONE_BARRIER: a step has one barrier, where queries and gradients of scores have two buffers.
constexpr bool ONE_BARRIER = STAGES == 2;
// DQ_IN_QUERIES: dq waits for its addition in the buffer of its step's queries, and the next queries are loaded there
// later.
constexpr bool DQ_IN_QUERIES = BULK_ADDS && !DQ_BUFFER;
// LOADS_SLOT: a tile is one block of a block mask, whose slot is loaded with the queries; that saves registers.
constexpr bool LOADS_SLOT =
    HAS_BLOCK_MASK && BLOCK_M == CANONICAL && BLOCK_N == CANONICAL && STAGES == 1 && MIN_BLOCKS > 1;
// DERIVES_ADDRESSES: tiles derive addresses (SharedTile), except with a block mask, with an order of additions and, for
// tiles of queries, with a window: there addresses that the compiler keeps would leave too few registers.
constexpr bool DERIVES_ADDRESSES = !(HAS_BLOCK_MASK || DETERMINISTIC);
constexpr bool SHARES_WEIGHTS = COMPUTES_DV && QUERY_WARPS > 1;
using KeyTile = SharedTile<BLOCK_N, HEAD_DIM, DERIVES_ADDRESSES>;
using ValueTile = SharedTile<BLOCK_N, HEAD_DIM_V, DERIVES_ADDRESSES>;
using QueryTile = SharedTile<BLOCK_M, HEAD_DIM, DERIVES_ADDRESSES && !HAS_WINDOW>;
using DoutTile = SharedTile<BLOCK_M, HEAD_DIM_V, DERIVES_ADDRESSES && !HAS_WINDOW>;
using ScoreTile = SharedTile<BLOCK_N, BLOCK_M, DERIVES_ADDRESSES>;

struct SharedStorage : SumStorage<SUM_BYTES> {
  alignas(128) unsigned char k[KeyTile::BYTES];                       // (BLOCK_N, HEAD_DIM)
  alignas(128) unsigned char v[COMPUTES_DK ? ValueTile::BYTES : 16];  // (BLOCK_N, HEAD_DIM_V)
  alignas(128) unsigned char q[STAGES * QueryTile::BYTES];            // (STAGES, BLOCK_M, HEAD_DIM)
  alignas(128) unsigned char dout[STAGES * DoutTile::BYTES];          // (STAGES, BLOCK_M, HEAD_DIM_V)
  alignas(SHARES_WEIGHTS ? 128 : 16) unsigned char weights[SHARES_WEIGHTS ? ScoreTile::BYTES : 16];
  alignas(COMPUTES_DK ? 128 : 16) unsigned char ds[COMPUTES_DK ? STAGES * ScoreTile::BYTES : 16];
  alignas(DQ_BUFFER ? 128 : 16) unsigned char dq[DQ_BUFFER ? BLOCK_M * HEAD_DIM * sizeof(float) : 16];
  float lse[STAGES][BLOCK_M], delta[STAGES][BLOCK_M + LOADS_SLOT];  // the slot's bits stand last in delta
  Work work;                                            // read again and again, because registers are scarce
  int* pending_signals[DETERMINISTIC ? NUM_WARPS : 1];  // each warp's place in the order that it has not passed on
};
static_assert(BLOCK_N == FRAGMENTS * KEY_WARPS * 16 && FRAGMENT_QUERIES % 16 == 0, "whole fragments");
static_assert(QUERY_WARPS == 1 || QUERY_PASSES == 1, "warps that share their weights have them at once");
static_assert(!DQ_IN_QUERIES || (ONE_BARRIER && HEAD_DIM == HEAD_DIM_V), "as many bytes as both buffers of a step");
static_assert(BLOCK_M <= NUM_THREADS, "a thread has a query's lse and delta");

// StepIterator iterates over the steps of a thread block.
using StepIterator = Either<CLUSTER == 1, QueryTileIterator, ClusterQueryTileIterator>::Type;

// Step is a tile of queries.
struct Step {
  int head, block;
  bool partial;

  DEVICE explicit Step(const QueryTileIterator& iterator)
      : head(iterator.head),
        block(DETERMINISTIC ? iterator.keys_in_reverse() : iterator.blocks.block),
        partial(iterator.blocks.partial) {}
  DEVICE explicit Step(const ClusterQueryTileIterator& iterator)
      : head(iterator.done() ? 0 : iterator.head()), block(iterator.done() ? 0 : iterator.block()), partial(false) {}
  DEVICE int first_row() const { return block * BLOCK_M; }
};

// load_queries() starts to load q and dout of a step, load_rows() its lse and delta.
DEVICE void load_queries(const AttentionParams& p, SharedStorage& shared, u32 stage, const Step& step) {
  const Sequence& s = shared.work.sequence;
  const i64 batch = batch_of(p, s);
  QueryTile{ptx::shared_address(shared.q) + stage * QueryTile::BYTES}.load(
      Rows(p.q.at(batch, s.row_q, step.head), p.q.row_stride, s.len_q, p.head_dim), step.first_row());
  DoutTile{ptx::shared_address(shared.dout) + stage * DoutTile::BYTES}.load(
      Rows(p.dout.at(batch, s.row_q, step.head), p.dout.row_stride, s.len_q, p.head_dim_v), step.first_row());
}

DEVICE void load_rows(const AttentionParams& p, SharedStorage& shared, u32 stage, const Step& step) {
  const Sequence& s = shared.work.sequence;
  const i64 batch = batch_of(p, s);
  if (threadIdx.x < BLOCK_M) {
    const i64 row = s.row_q + smaller(step.first_row() + threadIdx.x, s.len_q - 1);
    copy_float(&shared.lse[stage][threadIdx.x], p.lse.at(batch, row, step.head));
    copy_float(&shared.delta[stage][threadIdx.x], p.delta.at(batch, row, step.head));
  }
  if (LOADS_SLOT && threadIdx.x == 0) {
    const int* slot = Mask(p, s, step.head).slots + static_cast<i64>(step.block) * p.slot_columns + shared.work.tile;
    copy_float(&shared.delta[stage][BLOCK_M], reinterpret_cast<const float*>(slot));
  }
}

DEVICE void load_step(const AttentionParams& p, SharedStorage& shared, u32 stage, const Step& step) {
  if constexpr (!DQ_IN_QUERIES) load_queries(p, shared, stage, step);
  load_rows(p, shared, stage, step);
}

// finish_queries() waits for a step's copies, which are complete for all threads behind a barrier, and makes lse inf
// where a query has no weights.
DEVICE void finish_queries(SharedStorage& shared, u32 stage, const Step& step) {
  wait_for_copies();
  if (threadIdx.x < BLOCK_M) {
    float& lse = shared.lse[stage][threadIdx.x];
    const int row = step.first_row() + static_cast<int>(threadIdx.x);
    lse = row < shared.work.sequence.len_q && lse != -infinity() ? lse * LSE_BASE : infinity();
  }
}

// clear_hidden_keys() makes hidden keys 0 that are not finite, because they would count in dq. Finite keys need no look
// at every query.
DEVICE void clear_hidden_keys(const AttentionParams& p, const SharedStorage& shared, const KeyTile& keys) {
  const Sequence& s = shared.work.sequence;
  const int group = group_size(p), j = shared.work.tile * BLOCK_N + threadIdx.x;
  if (threadIdx.x >= BLOCK_N || keys.is_finite(threadIdx.x)) return;
  for (int head = shared.work.head * group; head < (shared.work.head + 1) * group; head++) {
    const Mask mask(p, s, head);
    const Score score(p, s, head);
    for (int i = 0; i < s.len_q; i++) {
      if (mask.visible(i, j) && score.may_be_seen(i, j)) return;
    }
  }
  keys.clear_row(threadIdx.x);
}

// load_next() goes on to the next step, and starts to load what follows into the buffers that have been read. It
// returns whether there is such a step; `iterator` is then ahead of it.
DEVICE bool load_next(const AttentionParams& p, SharedStorage& shared, u32 stage, StepIterator& iterator, Step& step) {
  step = Step(iterator);
  const bool exists = !iterator.done();
  if (exists) iterator.advance();
  if constexpr (ONE_BARRIER) {
    if (!iterator.done()) load_step(p, shared, stage, Step(iterator));
  } else if (exists) {
    load_queries(p, shared, 0, step);
    load_rows(p, shared, 0, step);
  }
  commit_copies();
  return exists;
}

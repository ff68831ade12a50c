// This header has the warps of Hopper's gradient kernel for heads up to 128 (backward.cu) that bring results of a step
// to global memory by TMA: the pieces of dq, which are added to their sums, and the gradient of a bias.
#include "narrow_storage.cuh"

// add_piece() adds a piece of dq to its sum by TMA, or stores it as the first.
DEVICE void add_piece(float* sum, u32 piece, bool first) {
  if (first) {
    ptx::bulk_store(sum, piece, DQ_BYTES);
  } else {
    ptx::bulk_reduce_add_f32(sum, piece, DQ_BYTES);
  }
}

// add_pieces() is the warp that adds a warpgroup's pieces of dq to their sums.
DEVICE void add_pieces(const AttentionParams& p, const SharedStorage& shared, Rings& rings, int piece) {
  DqRing ring(shared.dq[piece], shared.dq_barriers[piece]);
  while (true) {
    const DqStep step = next_dq_step(shared, rings);
    if (step.sum == NO_DQ) break;
    const bool adds = p.dq_sum != nullptr && lane() == 0;
    int found = STORED;
    if (adds) {
      wait_for_earlier_additions(p, step.sum, piece, step.place_in_order);
      if (TAKES_SUMS) found = take_sum(p, step.sum, piece);  // meanwhile the piece is computed
    }
    const bool first = found == NOT_STARTED || (DETERMINISTIC && step.place_in_order == 0);
    __syncwarp();
    ring.wait();
    if (adds) {
      if (found == TAKEN) wait_until_stored(p, step.sum, piece);
      add_piece(p.dq_sum + step.sum * DQ_TILE + piece * DQ_PIECE, ring.buffer(), first);
      ptx::bulk_commit_group();
      ptx::bulk_wait_group_read<0>();
    }
    __syncwarp();
    ring.release();
    if (adds && (DETERMINISTIC || first)) {
      ptx::bulk_wait_group<0>();
      signal_addition(p, step.sum, piece);
    }
    if (adds && step.last) {
      ptx::bulk_wait_group<0>();
      ptx::add_release(warps_done_at(p, step.number()), 1);
    }
  }
  if (lane() == 0) ptx::bulk_wait_group<0>();
}

// ADDS_STEPS: an addition that waits for its place in the order takes longer than a step. So with two buffers two warps
// take steps alternately, and each adds all pieces of its steps (add_steps()).
constexpr bool ADDS_STEPS = DETERMINISTIC && DQ_STAGES == 2;
static_assert(!ADDS_STEPS || DQ_PIECES == 2, "a warp for each room");

DEVICE void add_steps(const AttentionParams& p, const SharedStorage& shared, Rings& rings, u32 warp) {
  DqRing first(shared.dq[0], shared.dq_barriers[0]), second(shared.dq[1], shared.dq_barriers[1]);
  while (true) {
    const DqStep step = next_dq_step(shared, rings);
    if (step.sum == NO_DQ) break;
    second.follow(first);
    const bool adds = p.dq_sum != nullptr && lane() == 0;
    if (first.stage != warp) {
      if (adds && step.last) ptx::add_release(warps_done_at(p, step.number()), 1);
      first.advance();
      continue;
    }
    if (adds) wait_for_earlier_additions(p, step.sum, 0, step.place_in_order);
    __syncwarp();
    first.wait();
    second.wait();
    if (adds) {
      float* sum = p.dq_sum + step.sum * DQ_TILE;
      add_piece(sum, first.buffer(), step.place_in_order == 0);
      add_piece(sum + DQ_PIECE, second.buffer(), step.place_in_order == 0);
      ptx::bulk_commit_group();
      ptx::bulk_wait_group_read<0>();
    }
    __syncwarp();
    first.release();
    second.release();
    if (adds) {
      ptx::bulk_wait_group<0>();
      signal_addition(p, step.sum, 0);
      if (step.last) ptx::add_release(warps_done_at(p, step.number()), 1);
    }
  }
}

// write_pieces() is the warp that writes a warpgroup's pieces of dq, where each is complete.
DEVICE void write_pieces(const AttentionParams& p, const SharedStorage& shared, Rings& rings, int piece,
                         const ptx::TensorMap* map) {
  DqRing ring(shared.dq[piece], shared.dq_barriers[piece]);
  const int first_row = DQ_BY_QUERIES ? piece * ROWS_OF_WARPGROUP : 0;
  const int first_column = DQ_BY_QUERIES ? 0 : piece * DQ_COLUMNS;
  while (true) {
    const DqStep step = next_dq_step(shared, rings);
    if (step.sum == NO_DQ) break;
    ring.wait();
    if (lane() == 0) {
      const QueryPlace place(p, step.number());
#pragma unroll
      for (int panel = 0; panel < ceil_div(DQ_COLUMNS, PANEL); panel++) {
        ptx::tma_store(map, ring.buffer() + panel * DQ_PANEL_BYTES, first_column + panel * PANEL, place.row + first_row,
                       place.head, place.batch);
      }
      ptx::bulk_commit_group();
      ptx::bulk_wait_group_read<0>();
    }
    __syncwarp();
    ring.release();
  }
  if (lane() == 0) ptx::bulk_wait_group<0>();
}

// write_bias() is the warp that writes dbias, which is dS.
DEVICE void write_bias(const AttentionParams& p, const SharedStorage& shared, Rings& rings, const ptx::TensorMap* map) {
  while (true) {
    const DqStep step = next_dq_step(shared, rings);
    if (step.sum == NO_DQ) break;
    const QueryPlace place(p, step.number());
    rings.ds.wait();
    if (lane() == 0) {
#pragma unroll
      for (int panel = 0; panel < CONSUMERS; panel++) {
        ptx::tma_store(map, rings.ds.buffer() + panel * DS_PANEL_BYTES, step.first_key + panel * PANEL, place.row,
                       place.head, place.batch);
      }
      ptx::bulk_commit_group();
      ptx::bulk_wait_group_read<0>();
    }
    __syncwarp();
    rings.ds.release();
  }
  if (lane() == 0) ptx::bulk_wait_group<0>();
}

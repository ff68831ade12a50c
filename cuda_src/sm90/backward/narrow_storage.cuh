// This header has the shared memory of Hopper's gradient kernel for heads up to 128 (backward.cu), and a thread's
// positions in its circular buffers.
#include "loader.cuh"

constexpr int WARPS = CONSUMERS * WARPGROUP / WARP;
constexpr u32 DS_PANEL_BYTES = BLOCK_M * ROW_BYTES, DS_BYTES = CONSUMERS * DS_PANEL_BYTES;
constexpr u32 DQ_BYTES = DQ_PIECE * sizeof(float);
constexpr u32 DQ_PANEL_BYTES = ROWS_OF_WARPGROUP * ROW_BYTES;  // of 64 columns in 16 bits, where WRITES_DQ

struct SharedStorage {
  alignas(1024) unsigned char k[KEY_STAGES * K_BYTES];         // (KEY_STAGES, PANELS, BLOCK_N, 64)
  alignas(1024) unsigned char v[V_BYTES];                      // (PANELS_V, BLOCK_N, 64)
  alignas(1024) unsigned char q[QUERY_STAGES * Q_BYTES];       // (QUERY_STAGES, PANELS, BLOCK_M, 64)
  alignas(1024) unsigned char dout[DOUT_STAGES * DOUT_BYTES];  // (DOUT_STAGES, PANELS_V, BLOCK_M, 64)
  // (DS_STAGES, CONSUMERS, BLOCK_M, 64): dS, a panel for the keys of each warpgroup.
  alignas(1024) unsigned char ds[DS_STAGES * DS_BYTES];
  alignas(1024) FourFloats dq[CONSUMERS][DQ_STAGES][DQ_PIECE / 4];  // pieces of dq on their way to the sums, or to dq
  float lse[QUERY_STAGES][BLOCK_M];
  float delta[DOUT_STAGES][BLOCK_M];
  Step steps[QUERY_STAGES];
  DqStep dq_steps[DQ_STEPS];
  KeyWork work[WORK_STAGES];
  RingBarriers<WORK_STAGES> work_barriers;
  RingBarriers<KEY_STAGES> k_barriers;
  RingBarriers<1> v_barriers;
  RingBarriers<QUERY_STAGES> q_barriers;
  RingBarriers<DOUT_STAGES> dout_barriers;
  RingBarriers<DS_STAGES> ds_barriers;
  RingBarriers<DQ_STAGES> dq_barriers[CONSUMERS];
  RingBarriers<DQ_STEPS> dq_step_barriers;
  u64 clearing;          // a barrier (Loader::clearing)
  int rows_ready[WARP];  // params.rows_ready as far as each lane knows it
  GradientBias bias;     // last, so that the others begin with whole lines: bulk additions of dq are faster then
};
static_assert(BLOCK_N == CONSUMERS * ROWS_OF_WARPGROUP, "a warpgroup has 64 keys");
static_assert(DQ_PIECES == CONSUMERS, "a warpgroup has a piece of dq");
static_assert(DQ_COLUMNS * sizeof(float) >= ROW_BYTES, "a warp's part of dq has room for rows of dk and dv");

using DsRing = Ring<DS_STAGES, DS_BYTES>;
using DqRing = Ring<DQ_STAGES, DQ_BYTES>;

// Rings are one thread's positions in the circular buffers of the kernel.
struct Rings {
  Ring<WORK_STAGES, sizeof(KeyWork)> work;
  Ring<KEY_STAGES, K_BYTES> k;
  Ring<1, V_BYTES> v;
  Ring<QUERY_STAGES, Q_BYTES> q;
  Ring<DOUT_STAGES, DOUT_BYTES> dout;
  DsRing ds;
  Ring<DQ_STEPS, sizeof(DqStep)> dq_steps;

  DEVICE explicit Rings(const SharedStorage& shared)
      : work(shared.work, shared.work_barriers),
        k(shared.k, shared.k_barriers),
        v(shared.v, shared.v_barriers),
        q(shared.q, shared.q_barriers),
        dout(shared.dout, shared.dout_barriers),
        ds(shared.ds, shared.ds_barriers),
        dq_steps(shared.dq_steps, shared.dq_step_barriers) {}
};

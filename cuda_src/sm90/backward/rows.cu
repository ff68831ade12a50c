// These kernels run before and behind Hopper's backward pass. backward_sm90_rows prepares lse and delta
// (FlashAttention-2, Dao 2023, Algorithm 2, line 4) as the backward kernels load them, makes sums 0, and
// writes zeros where dbias is not visited. backward_sm90_dq converts dq from its float32 sums to the dtype. Both
// overlap with the pass itself (programmatic dependent launch).
#include "../../fragment/gradient_fragment.cuh"
#include "query_results.cuh"

// ROW_STAGES and SUM_STAGES are the stages of these kernels: of tiles of dout and out, and of sums.
constexpr int ROW_STAGES = DOUT_STAGES, SUM_STAGES = QUERY_STAGES;

// GROUPS warpgroups compute rows. Tiles of dout and out come by TMA, and the warpgroups take tiles round robin, so that
// each has buffers of its own.
constexpr int GROUPS = ROW_STAGES < CONSUMERS ? ROW_STAGES : CONSUMERS;
static_assert(ROW_STAGES % GROUPS == 0, "or one could be ahead of another by all buffers");
constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;
// LANES lanes share a row, of which each reads CHUNKS chunks of 16 bytes in each panel.
constexpr int LANES = WARPGROUP / BLOCK_M, CHUNKS = ROW_BYTES / sizeof(uint4) / LANES;
constexpr u32 TILE_BYTES = BLOCK_M * ROW_BYTES * PANELS_V;

// SharedStorage is the shared memory of the first kernel.
struct SharedStorage {
  alignas(1024) unsigned char tiles[ROW_STAGES][2][TILE_BYTES];  // (ROW_STAGES, dout or out, PANELS_V, BLOCK_M, 64)
  RingBarriers<ROW_STAGES> barriers;
};
using TileRing = Ring<ROW_STAGES, 2 * TILE_BYTES>;

// clear_bias() makes rows [row, row + rows) of dbias 0 outside columns [begin, end). A warpgroup calls it; rows are
// vectors of 16 bytes.
DEVICE void clear_bias(const AttentionParams& p, const Work& work, int row, int rows, int begin, int end) {
  const int skipped = larger(end - begin, 0);
  BiasElement* target = p.dbias.data + work.sequence.batch * p.dbias.batch_stride + work.head * p.dbias.head_stride;
  for (int i = row; i < row + rows; i++) {
    for (int j = threadIdx.x % WARPGROUP * VECTOR; j < p.seqlen_k - skipped; j += WARPGROUP * VECTOR) {
      auto* vector = target + i * p.dbias.row_stride + (j < begin ? j : j + skipped);
      *reinterpret_cast<uint4*>(vector) = make_uint4(0, 0, 0, 0);
    }
  }
}

// clear_sums() makes the sum of dq of a tile 0. A warpgroup calls it.
DEVICE void clear_sums(const AttentionParams& p, i64 tile) {
  if (!FIRST_ADDITION_STORES && p.dq_sum != nullptr) {
    auto* sum = reinterpret_cast<float4*>(p.dq_sum + tile * DQ_TILE);
#pragma unroll 2
    for (int i = threadIdx.x % WARPGROUP; i < DQ_TILE / 4; i += WARPGROUP) sum[i] = make_float4(0, 0, 0, 0);
  }
}

// is_visited() tells whether a step of the pass visits a tile of queries, as far as this kernel needs to know.
DEVICE bool is_visited(const AttentionParams& p, const Work& work) {
  if constexpr (!WRITES_DQ) return true;
  const Blocks seen = blocks_of_queries(p, work.sequence, work.head, 0, BLOCK_M, BLOCK_N);
  return work.tile >= seen.block && work.tile < seen.end;
}

// clear_dq() makes dq of a tile 0. A warpgroup calls it.
DEVICE void clear_dq(const AttentionParams& p, const Work& work) {
  const int first_row = work.tile * BLOCK_M, rows = smaller(work.sequence.rows_q - first_row, BLOCK_M);
  const int vectors = p.head_dim / VECTOR;  // head dims are multiples of VECTOR here
  Element* target = p.dq.at(work.sequence.batch, first_row, work.head);
  for (int i = threadIdx.x % WARPGROUP; i < rows * vectors; i += WARPGROUP) {
    *reinterpret_cast<uint4*>(target + i / vectors * p.dq.row_stride + i % vectors * VECTOR) = make_uint4(0, 0, 0, 0);
  }
}

// load_rows() is the loading thread. It reports how many tiles are done as it comes around its buffers, because a
// report is a fence for all memory, which costs time.
DEVICE void load_rows(const AttentionParams& p, TileRing ring, u32 tiles, const ptx::TensorMap* dout,
                      const ptx::TensorMap* out) {
  int loaded = 0, reported = 0;
  const auto report_done = [&](int done) {
    if (p.rows_ready != nullptr && done > reported) ptx::add_release(p.rows_ready + blockIdx.x, done - reported);
    reported = larger(reported, done);
  };
  for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Work work = work_of<false>(p, BLOCK_M, p.num_heads_q, false, tile);
    const int row = work.sequence.row_q + work.tile * BLOCK_M, batch = batch_of(p, work.sequence);
    ring.acquire();
    if (is_visited(p, work)) {
      ring.expect();
#pragma unroll
      for (int panel = 0; panel < PANELS_V; panel++) {
        const u32 target = ring.buffer() + panel * BLOCK_M * ROW_BYTES;
        ptx::tma_load(target, dout, ring.full(), panel * PANEL, row, work.head, batch);
        ptx::tma_load(target + TILE_BYTES, out, ring.full(), panel * PANEL, row, work.head, batch);
      }
      ring.advance();
    } else {
      ring.publish();
    }
    loaded++;
    if (ring.stage == 0) report_done(loaded - ROW_STAGES);  // the tiles that were in these buffers before are done
  }
  for (int stage = 0; stage < ROW_STAGES; stage++) {
    ring.acquire();
    ring.advance();
  }
  report_done(loaded);
}

// backward_sm90_rows prepares tiles of queries: persistent blocks take tiles round robin.
extern "C" __global__ void __launch_bounds__(THREADS)
    backward_sm90_rows(const __grid_constant__ AttentionParams p, const __grid_constant__ ptx::TensorMap dout_map,
                       const __grid_constant__ ptx::TensorMap out_map) {
  VIEW_SHARED_STORAGE(shared);
  const u32 tiles = p.num_tiles * num_batch_heads_q(p);
  if (threadIdx.x == 0) {
    shared.barriers.init(WARPGROUP / WARP);
    ptx::fence_mbarrier_init();
    if (p.rows_ready != nullptr) p.rows_ready[blockIdx.x] = 0;
  }
  if (p.dq_order != nullptr) {
    const u32 words = 2 + tiles * DQ_SUMS * DQ_PIECES + num_batch_heads_q(p) / group_size(p);
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < words; i += gridDim.x * THREADS) p.dq_order[i] = 0;
  }
  if constexpr (WRITES_DSLOPES) {
    const i64 sums = num_batch_heads_q(p) * p.dslope_rows.head_stride;
    for (i64 i = blockIdx.x * THREADS + threadIdx.x; i < sums; i += gridDim.x * THREADS) p.dslope_rows.data[i] = 0;
  }
  __threadfence();
  __syncthreads();
  ptx::let_next_kernel_begin();

  TileRing ring(shared.tiles, shared.barriers);
  const int warpgroup = threadIdx.x / WARPGROUP;
  if (warpgroup == CONSUMERS) {
    if (threadIdx.x % WARPGROUP == 0) load_rows(p, ring, tiles, &dout_map, &out_map);
    return;
  }
  if (warpgroup >= GROUPS) return;
  const int row = threadIdx.x % WARPGROUP / LANES, first = threadIdx.x % LANES * CHUNKS;
  u32 i = warpgroup;
  for (u32 tile = blockIdx.x + warpgroup * gridDim.x; tile < tiles; tile += GROUPS * gridDim.x, i += GROUPS) {
    const Work work = work_of<false>(p, BLOCK_M, p.num_heads_q, false, tile);
    const Sequence& s = work.sequence;
    const int first_row = work.tile * BLOCK_M, own_row = first_row + row;
    const i64 batch = batch_of(p, s), at = s.row_q + own_row;
    const bool used = own_row < s.len_q;
    const float lse = used ? *p.lse.at(batch, at, work.head) : -infinity();
    float sum = used && p.dlse.data != nullptr && first == 0 ? -*p.dlse.at(batch, at, work.head) : 0;
    if (WRITES_DBIAS && p.dbias.data != nullptr) {
      const Blocks seen = blocks_of_keys(p, s, work.head, work.tile, BLOCK_M, BLOCK_N);
      const int end = smaller(seen.end * BLOCK_N, p.seqlen_k);
      clear_bias(p, work, first_row, smaller(BLOCK_M, s.rows_q - first_row), smaller(seen.block * BLOCK_N, end), end);
    }
    clear_sums(p, tile);
    const bool visited = is_visited(p, work);
    if (WRITES_DQ && !visited) clear_dq(p, work);
    ring.stage = i % ROW_STAGES;
    ring.phase = i / ROW_STAGES % 2;
    ring.wait();
#pragma unroll
    for (int panel = 0; panel < PANELS_V; panel++) {
      if (!visited) break;  // out is 0 where a query sees no key
#pragma unroll
      for (int step = 0; step < CHUNKS; step++) {
        // Both tiles are swizzled alike, so any order of chunks will do, and this one meets all banks.
        const u32 place = (panel * BLOCK_M + row) * ROW_BYTES + (first + (row + step) % CHUNKS) * sizeof(uint4);
        const auto a = *reinterpret_cast<const Vector*>(shared.tiles[ring.stage][0] + place);
        const auto b = *reinterpret_cast<const Vector*>(shared.tiles[ring.stage][1] + place);
#pragma unroll
        for (int e = 0; e < VECTOR; e++) sum += to_accum(a.e[e]) * to_accum(b.e[e]);
      }
    }
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, lanes);
    if (first == 0) {
      if (lse == -infinity()) sum = 0;
      const i64 number = static_cast<i64>(tile) * BLOCK_M + row;
      p.row_lse[number] = lse == -infinity() ? infinity() : lse * LSE_BASE;
      p.row_delta[number] = sum / ds_unit(p);
      if (p.delta.data != nullptr && s.batch >= 0 && own_row < s.rows_q) *p.delta.at(batch, at, work.head) = sum;
    }
    __syncwarp();
    ring.release();
  }
}

// ---- The kernel behind the pass converts dq; a warpgroup converts a piece at a time.
constexpr u32 SUM_BYTES = DQ_PIECE * sizeof(float), NO_SUM = ~0u;
constexpr int CHUNK = 16;  // most pieces of sums that a thread block takes at a time

// SumStorage is the shared memory of the second kernel.
struct SumStorage {
  alignas(16) unsigned char sums[SUM_STAGES][DQ_SUMS][SUM_BYTES];  // (SUM_STAGES, DQ_SUMS, piece)
  // The number of the piece, and a bit for each of its sums that something was added to.
  u32 pieces[SUM_STAGES], found[SUM_STAGES];
  RingBarriers<SUM_STAGES> barriers;
};
using SumRing = Ring<SUM_STAGES, DQ_SUMS * SUM_BYTES>;
static_assert(SUM_STAGES % CONSUMERS == 0, "or one could be ahead of another by all buffers");

// load_sums() is the loading warp: it takes chunks of pieces, waits until their sums are complete, and loads them.
DEVICE void load_sums(const AttentionParams& p, SumStorage& shared, SumRing ring, u32 pieces, bool by_heads) {
  const int all = ceil_div(p.seqlen_k, DQ_PIECES * ROWS_OF_WARPGROUP) * DQ_PIECES * p.splits;
  // find() finds which sums of a tile something was added to. A sum whose first addition was to be stored, and to which
  // nothing was added, is not even zero.
  const auto find = [&](i64 number) {
    u32 found = 0;
    for (int i = 0; i < DQ_SUMS; i++) {
      const int* order = dq_order_at(p, number * DQ_SUMS + i, 0);
      if (!FIRST_ADDITION_STORES || ptx::load_volatile(order) != NOT_STARTED) found |= 1u << i;
    }
    return found;
  };
  const auto hand_on = [&](u32 piece, u32 found) {
    ring.acquire();
    __syncwarp();
    if (lane() == 0) {
      shared.pieces[ring.stage] = piece;
      shared.found[ring.stage] = found;
      ptx::mbarrier_arrive_expect(ring.full(), __popc(found) * SUM_BYTES);
      for (int i = 0; i < DQ_SUMS; i++) {
        if ((found >> i & 1) == 0) continue;
        const i64 sum = static_cast<i64>(piece / DQ_PIECES) * DQ_SUMS + i;
        ptx::bulk_load(ring.buffer() + i * SUM_BYTES, p.dq_sum + sum * DQ_TILE + piece % DQ_PIECES * DQ_PIECE,
                       SUM_BYTES, ring.full());
      }
    }
    ring.advance();
  };
  // In a small grid each thread block has one chunk, and need not ask for it.
  const u32 size = min(CHUNK, ceil_div(pieces, gridDim.x));
  const bool asks = p.dq_order != nullptr && gridDim.x * size < pieces;
  for (u32 chunk = blockIdx.x;; chunk += gridDim.x) {
    if (asks) chunk = __shfl_sync(ALL_LANES, lane() == 0 ? atomicAdd(chunks_taken(p), 1) : 0, 0);
    if (chunk * size >= pieces) break;
    const u32 piece = min(chunk * size + lane() % CHUNK, pieces - 1);
    const i64 number = piece / DQ_PIECES;
    const Work work = work_of<false>(p, BLOCK_M, p.num_heads_q, false, number);
    const bool in_use = work.tile * BLOCK_M < work.sequence.len_q;
    u32 found = 0;
    // This loop looks for sums while it waits, as another look behind the wait would take as long again.
    while (by_heads && ptx::load_acquire(warps_done_at(p, number)) != all) found = find(number);
    if (found != (1u << DQ_SUMS) - 1) found = find(number);
    if (!in_use) found = 0;
    __syncwarp();
    for (u32 i = 0; i < size && chunk * size + i < pieces; i++) {
      hand_on(chunk * size + i, __shfl_sync(ALL_LANES, found, i));
    }
  }
  for (int i = 0; i < CONSUMERS; i++) hand_on(NO_SUM, 0);
}

// backward_sm90_dq converts pieces of dq: persistent blocks take chunks of pieces.
extern "C" __global__ void __launch_bounds__(THREADS) backward_sm90_dq(const __grid_constant__ AttentionParams p) {
  using SharedStorage = SumStorage;
  VIEW_SHARED_STORAGE(shared);
  if (threadIdx.x == 0) {
    shared.barriers.init(WARPGROUP / WARP);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const bool by_heads = DQ_BY_HEADS && p.cu_seqlens_q == nullptr && p.seqlen_k > 0;
  if (!by_heads) ptx::wait_for_kernel_before();
  SumRing ring(shared.sums, shared.barriers);
  const int warpgroup = threadIdx.x / WARPGROUP;
  if (warpgroup == CONSUMERS) {
    if (threadIdx.x % WARPGROUP < WARP) {
      load_sums(p, shared, ring, p.num_tiles * num_batch_heads_q(p) * DQ_PIECES, by_heads);
      ptx::wait_for_kernel_before();  // so that the next kernel follows both kernels
    }
    return;
  }
  float scale = static_cast<float>(p.softmax_scale) * ds_unit(p);
  ptx::keep(scale);
  for (int i = warpgroup;; i += CONSUMERS) {
    ring.stage = i % SUM_STAGES;
    ring.phase = i / SUM_STAGES % 2;
    ring.wait();
    const u32 number = shared.pieces[ring.stage], found = shared.found[ring.stage];
    if (number == NO_SUM) break;
    float4 dq[DQ_COLUMNS / 8];  // the thread's fragment of the piece (64, DQ_COLUMNS)
    const auto* sum = reinterpret_cast<const float4*>(shared.sums[ring.stage]) + dq_place();
#pragma unroll
    // The buffer holds nothing where no sum was found.
    for (int i = 0; i < DQ_COLUMNS / 8; i++) dq[i] = found != 0 ? sum[i * WARP] : float4{};
    if (DQ_SUMS == 2 && (found & 2) != 0) {
#pragma unroll
      for (int i = 0; i < DQ_COLUMNS / 8; i++) {
        const float4 x = sum[DQ_PIECE / 4 + i * WARP];
        dq[i] = make_float4(dq[i].x + x.x, dq[i].y + x.y, dq[i].z + x.z, dq[i].w + x.w);
      }
    }
    __syncwarp();
    ring.release();

    const Work work = work_of<false>(p, BLOCK_M, p.num_heads_q, false, number / DQ_PIECES);
    const Sequence& s = work.sequence;
    const int piece = number % DQ_PIECES;
    const int first_row = work.tile * BLOCK_M + (DQ_BY_QUERIES ? piece * ROWS_OF_WARPGROUP : 0);
    const int column = DQ_BY_QUERIES ? 0 : piece * DQ_COLUMNS;
    const int used = found != 0 ? s.len_q : 0;  // rows that are not padding
    if constexpr (WIDE_RESULTS) {
      float* target = wide(p.dq).at(batch_of(p, s), s.row_q, work.head);
#pragma unroll
      for (int i = 0; i < DQ_COLUMNS / 8; i++) {
        const int row = first_row + warp_row() + fragment_row(), own = column + 8 * i + fragment_column();
        const float4 x = dq[i];
        const auto write = [&](int row, float a, float b) {
          if (row >= s.rows_q) return;
          const bool is_used = row < used;  // padding is selected rather than multiplied by 0, because it may be NaN
          write_pair(target + row * p.dq.row_stride, own, p.head_dim, is_used ? a * scale : 0, is_used ? b * scale : 0);
        };
        write(row, x.x, x.y);
        write(row + 8, x.z, x.w);
      }
      continue;
    }
    write_dq_rows(p, p.dq.at(batch_of(p, s), s.row_q, work.head) + column, first_row + warp_row() + fragment_row(),
                  used, s.rows_q, p.head_dim - column, scale, [&](int block) { return dq[block]; });
  }
}

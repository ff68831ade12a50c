// This header has the shared memory of Hopper's backward kernels on float32 operands in float16 parts
// (split/sm90_backward.cu), and their loading thread. OF_KEYS: a thread block keeps BLOCK_N keys and computes dk, dv or
// both; otherwise it keeps BLOCK_M queries and computes dq. `rows` are what a thread block keeps, `columns` what it
// visits.
#include "../sm90/wgmma.cuh"

constexpr int PAIR = 1, KEY_WARPS = 1;  // there are no clusters, and each warp has whole rows
#include "../sm90/backward/schedule.cuh"
#include "../sm90/hidden_values.cuh"
#include "layout.cuh"
#include "sm90_products.cuh"
#include "../fragment/score_gradient.cuh"

constexpr int ROWS = OF_KEYS ? BLOCK_N : BLOCK_M, COLUMNS = OF_KEYS ? BLOCK_M : BLOCK_N;
using ColumnIterator = ColumnIteratorOf<OF_KEYS, QueryTileIterator>::Type;
constexpr bool NEEDS_GRADIENTS = !OF_KEYS || COMPUTES_DK;
static_assert(OF_KEYS == (COMPUTES_DK || COMPUTES_DV), "dk, dv, both, or dq");
constexpr u32 ROWS_BYTES = KEY_PARTS * part_bytes(ROWS, HEAD_DIM);
constexpr u32 ROWS_V_BYTES = NEEDS_GRADIENTS ? PARTS * part_bytes(ROWS, HEAD_DIM_V) : 0;
constexpr u32 COLUMNS_BYTES = KEY_PARTS * part_bytes(COLUMNS, HEAD_DIM);
constexpr u32 COLUMNS_V_BYTES = PARTS * part_bytes(COLUMNS, HEAD_DIM_V);
constexpr u32 VECTOR_BYTES = COLUMNS * sizeof(float);

// ColumnVectors are the numbers of a tile's columns: their factors and, if they are queries, lse (inf where they have
// no weights) and delta.
struct ColumnVectors {
  static constexpr int COUNT = OF_KEYS ? 4 : 2;
  float vectors[COUNT][COLUMNS];

  DEVICE const float* factors() const { return vectors[0]; }
  DEVICE const float* factors_v() const { return vectors[1]; }
  DEVICE float lse(int column) const { return vectors[COUNT - 2][column]; }
  DEVICE float delta(int column) const { return vectors[COUNT - 1][column]; }
};

struct SharedStorage {
  // `rows` holds q or k in KEY_PARTS parts, then dout or v in PARTS parts: (parts, panels, ROWS, 64) each.
  alignas(1024) unsigned char rows[ROWS_BYTES + ROWS_V_BYTES];
  alignas(1024) unsigned char columns[STAGES * COLUMNS_BYTES];  // k or q: (STAGES, KEY_PARTS, PANELS, COLUMNS, 64)
  // `columns_v` holds v or dout: (STAGES_V, PARTS, PANELS_V, COLUMNS, 64).
  alignas(1024) unsigned char columns_v[STAGES_V * COLUMNS_V_BYTES];
  alignas(16) ColumnVectors vectors[STAGES];  // the vectors come and go with the columns
  Work work[WORK_STAGES];
  RingBarriers<WORK_STAGES> work_barriers;
  RingBarriers<1> rows_barriers;
  RingBarriers<STAGES> columns_barriers;
  RingBarriers<STAGES_V> columns_v_barriers;
  SeenKeys seen;
};
static_assert(ROWS == CONSUMERS * ROWS_OF_WARPGROUP, "a warpgroup has 64 rows");

// Rings are one thread's positions in the circular buffers of the kernel.
struct Rings {
  WorkRing work;
  Ring<1, ROWS_BYTES + ROWS_V_BYTES> rows;
  Ring<STAGES, COLUMNS_BYTES> columns;
  Ring<STAGES_V, COLUMNS_V_BYTES> columns_v;

  DEVICE explicit Rings(const SharedStorage& shared)
      : work(shared.work, shared.work_barriers),
        rows(shared.rows, shared.rows_barriers),
        columns(shared.columns, shared.columns_barriers),
        columns_v(shared.columns_v, shared.columns_v_barriers) {}
};

DEVICE Work any_work_at(const AttentionParams& p, u32 index) {
  return OF_KEYS ? key_work_at<true>(p, index) : work_at(p, index);
}

// load_tiles() is the loading thread, which is its own scheduler.
DEVICE void load_tiles(const AttentionParams& p, const SplitOperands& operands, u8* space, SharedStorage& shared,
                       Rings rings, const ptx::TensorMap* q_map, const ptx::TensorMap* k_map,
                       const ptx::TensorMap* v_map, const ptx::TensorMap* dout_map) {
  const u32 total = p.num_tiles * (OF_KEYS ? num_batch_heads_kv(p) : num_batch_heads_q(p));
  for (u32 index = blockIdx.x, next; index < total; index = next) {
    next = next_index(p, index, total);
    const Work work = any_work_at(p, index);
    const Sequence& s = work.sequence;
    if (work.tile * ROWS >= (OF_KEYS ? s.rows_k : s.rows_q)) continue;
    rings.work.acquire();
    shared.work[rings.work.stage] = work;
    rings.work.publish();

    const int group = group_size(p), head_kv = OF_KEYS ? work.head : work.head / group;
    const int batch = batch_of(p, s), batch_head_kv = batch * p.num_heads_kv + head_kv;
    const int first_q = split_row_q(p, s), first_k = split_row_k(p, s);
    bool first = true;
    for (ColumnIterator iterator(p, work); !iterator.done(); iterator.advance()) {
      const int batch_head_q = batch * p.num_heads_q + iterator.head;
      const int row = (OF_KEYS ? first_q : first_k) + iterator.blocks.block * COLUMNS;
      rings.columns.acquire();
      rings.columns.expect(sizeof(ColumnVectors));
      const u32 buffer = ptx::shared_address(&shared.vectors[rings.columns.stage]), full = rings.columns.full();
      const auto load_vector = [&](int number, const float* from) {
        ptx::bulk_load(buffer + number * VECTOR_BYTES, from, VECTOR_BYTES, full);
      };
      if constexpr (OF_KEYS) {
        load_vector(0, operands.q.factors_at(space, batch_head_q, row));
        load_vector(1, operands.dout.factors_at(space, batch_head_q, row));
        load_vector(2, operands.lse_at(space, batch_head_q, row));
        load_vector(3, operands.delta_at(space, batch_head_q, row));
      } else {
        load_vector(0, operands.k.factors_at(space, batch_head_kv, row));
        load_vector(1, operands.v.factors_at(space, batch_head_kv, row));
      }
      const int batch_head = OF_KEYS ? batch_head_q : batch_head_kv,
                own_batch_head = OF_KEYS ? batch_head_kv : batch_head_q;
      ptx::tma_load(rings.columns.buffer(), OF_KEYS ? q_map : k_map, full, 0, row, 0, batch_head);
      rings.columns.advance();
      if (first) {
        const int own = (OF_KEYS ? first_k : first_q) + work.tile * ROWS;
        rings.rows.acquire();
        rings.rows.expect();
        ptx::tma_load(rings.rows.buffer(), OF_KEYS ? k_map : q_map, rings.rows.full(), 0, own, 0, own_batch_head);
        if constexpr (NEEDS_GRADIENTS) {
          ptx::tma_load(rings.rows.buffer() + ROWS_BYTES, OF_KEYS ? v_map : dout_map, rings.rows.full(), 0, own, 0,
                        own_batch_head);
        }
        rings.rows.advance();
        first = false;
      }
      load(rings.columns_v, OF_KEYS ? dout_map : v_map, row, batch_head);
    }
  }
  rings.work.acquire();
  shared.work[rings.work.stage] = {{}, 0, NO_TILE};
  rings.work.publish();
}

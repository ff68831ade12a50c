// This header is the epilogue of the kernels of gradients.cuh: it writes what a thread block has summed for its rows,
// dk and dv of keys or dq of queries, and what the rows add to the slope's gradient.
#include "gradients_storage.cuh"

// Epilogue is a thread with its rows, and has a function for each kind of result.
struct Epilogue {
  const AttentionParams& p;
  SharedStorage& shared;
  const Work& work;
  const Sequence& s;
  const WarpPlace& own;
  const Accum scale;
  const i64 batch;
  const int num_rows, len;  // the rows of the results, and those in use

  DEVICE Epilogue(const AttentionParams& p, SharedStorage& shared, const WarpPlace& own)
      : p(p),
        shared(shared),
        work(shared.work),
        s(work.sequence),
        own(own),
        scale(static_cast<Accum>(p.softmax_scale)),
        batch(batch_of(p, s)),
        num_rows(OF_KEYS ? s.rows_k : s.rows_q),
        len(OF_KEYS ? s.len_k : s.len_q) {}

  // write_dq() writes a fragment of dq, write_dk() and write_dv() of dk and dv: `row` is the thread's first row.
  DEVICE void write_dq(int row, Accum (&gradient)[KEYED_GRADIENT], const Units& units, const Accum (&factor)[2]) const {
    restore_channels(gradient, p, work, Operand::Q, own.own_dim);
    write_in_units(units, p.dq.at(batch, s.row_q, work.head) + own.own_dim, p.dq.row_stride, row, len, num_rows,
                   p.head_dim - own.own_dim, gradient, factor);
  }

  DEVICE void write_dk(int row, Accum (&gradient)[KEYED_GRADIENT], const Units& units, const Accum (&factor)[2]) const {
    restore_channels(gradient, p, work, Operand::K, own.own_dim);
    write_in_units(units, p.dk.at(batch, s.row_k, work.head) + own.own_dim, p.dk.row_stride, row, len, num_rows,
                   p.head_dim - own.own_dim, gradient, factor);
  }

  DEVICE void write_dv(int row, Accum (&gradient)[VALUED_GRADIENT], const Units& units,
                       const Accum (&factor)[2]) const {
    restore_channels(gradient, p, work, Operand::V, own.own_dim);
    write_in_units(units, p.dv.at(batch, s.row_k, work.head) + own.own_dim, p.dv.row_stride, row, len, num_rows,
                   p.head_dim_v - own.own_dim, gradient, factor);
  }

  // write_dslopes() writes what a fragment of queries adds to the slope's gradient, a number for each row.
  DEVICE void write_dslopes(int row, const Accum (&dslope)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      Accum total = sum_of_row<4>(dslope[r]);
      const int i = row + 8 * r;
      if constexpr (KEY_WARPS > 1) {
        Accum* totals = reinterpret_cast<Accum*>(shared.rows) + fragment_row();
#pragma unroll
        for (int other = 1; other < KEY_WARPS; other *= 2) {  // the order gives all warps the same bits
          __syncthreads();
          totals[own.warp * 8] = total;
          __syncthreads();
          total += totals[(own.warp ^ other) * 8];
        }
      }
      if (lane() % 4 == 0 && i < s.rows_q) *p.dslope_rows.at(batch, s.row_q + i, work.head) = total;
    }
  }
};

// This kernel appends new keys and values to caches: it finds the place of each row, rotates k and q by the angles of
// their positions (Su et al., RoFormer, 2021), and converts to e4m3 where the cache holds that. One launch does all for
// k, v and q, and reads lengths and the block table on the device, so that a captured graph may hold it.
#include "../params.cuh"
#include "e4m3.cuh"

// Cells is an array (batch or page, row or slot, head, column), whose strides are in elements. Packed rows have a batch
// stride of 0.
template <class T>
struct Cells {
  T* data;
  i64 outer_stride, row_stride, head_stride, column_stride;

  DEVICE T* at(i64 outer, i64 row, i64 head) const {
    return data + outer * outer_stride + row * row_stride + head * head_stride;
  }
};

// Table is an array (row, column); a list has rows alone.
template <class T>
struct Table {
  T* data;
  i64 row_stride, column_stride;

  DEVICE T* at(i64 row, i64 column = 0) const { return data + row * row_stride + column * column_stride; }
};

struct AppendParams {
#include "AppendParams.members"
};
#include "AppendParams.layout"

template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T e[N];
};

// NewRow is one of the new rows: where it stands among these, and where it belongs.
struct NewRow {
  i64 outer, row;  // in k, v and q
  i64 position;    // in its sequence
  i64 page, slot;  // in the caches
  bool in_use;     // it belongs to a sequence
  bool kept;       // the cache has a place for it

  DEVICE NewRow(const AppendParams& p, i64 index) {
    int batch;
    i64 in_sequence;
    if constexpr (PACKED) {
      // The last sequence that begins here or before is the row's own; -1 stands for the padding before the first.
      int low = -1, high = p.batch;
      while (low < high) {
        const int middle = low + (high - low + 1) / 2;
        if (clamped(*p.cu_seqlens.at(middle), p.seqlen) <= index) {
          low = middle;
        } else {
          high = middle - 1;
        }
      }
      in_use = low >= 0 && low < p.batch;
      batch = in_use ? low : 0;
      outer = 0;
      row = index;
      in_sequence = in_use ? index - clamped(*p.cu_seqlens.at(batch), p.seqlen) : 0;
    } else {
      batch = static_cast<int>(index / p.seqlen);
      in_use = true;
      outer = batch;
      row = in_sequence = index % p.seqlen;
    }
    position = in_use ? *p.kv_lengths.at(batch) + in_sequence : 0;
    kept = in_use && position >= 0 && position < p.capacity;
    page = batch;
    slot = position;
    if constexpr (PAGED) {
      page = kept ? *p.block_table.at(batch, position / p.page_size) : 0;
      slot = kept ? position % p.page_size : 0;
      kept = kept && page >= 0 && page < p.num_pages;
    }
  }
};

// Unit is what one thread copies of a head's row: WIDTH columns from `first` on, and as many from `second` on. Where
// they are rotated they hold the pairs from `pair` on.
constexpr int UNIT = 2 * WIDTH;
struct Unit {
  int first, second, pair;
  bool is_rotated, has_second;

  DEVICE Unit(int number, int rotary_dim, int head_dim) {
    is_rotated = number < rotary_dim / UNIT;
    pair = number * WIDTH;
    first = is_rotated && !INTERLEAVED ? pair : number * UNIT;
    second = is_rotated && !INTERLEAVED ? rotary_dim / 2 + pair : first + WIDTH;
    has_second = second < head_dim;
  }
};

// read_angles() reads cos or sin of WIDTH pairs.
template <class T>
DEVICE void read_angles(Accum (&angles)[WIDTH], const Table<const T>& table, i64 row, int pair) {
#pragma unroll
  for (int i = 0; i < WIDTH; i += TABLE_WIDTH) {
    const auto pack = *reinterpret_cast<const Pack<T, TABLE_WIDTH>*>(table.at(row, pair + i));
#pragma unroll
    for (int e = 0; e < TABLE_WIDTH; e++) angles[i + e] = static_cast<Accum>(to_accum(pack.e[e]));
  }
}

// rotate() rotates the pairs of a unit in place.
DEVICE void rotate(Accum (&x)[UNIT], const AppendParams& p, const Unit& unit, i64 position) {
  constexpr int TO_NEXT = INTERLEAVED ? 2 : 1, TO_PARTNER = INTERLEAVED ? 1 : WIDTH;
  const i64 last = p.num_positions - 1, row = position < 0 ? 0 : position > last ? last : position;
  Accum cos[WIDTH], sin[WIDTH];
  read_angles(cos, p.cos, row, unit.pair);
  read_angles(sin, p.sin, row, unit.pair);
#pragma unroll
  for (int i = 0; i < WIDTH; i++) {
    const Accum a = x[i * TO_NEXT], b = x[i * TO_NEXT + TO_PARTNER];
    x[i * TO_NEXT] = a * cos[i] - b * sin[i];
    x[i * TO_NEXT + TO_PARTNER] = a * sin[i] + b * cos[i];
  }
}

// copy_unit() copies one unit, rotated if it is a rotated one and its row is in use. `scale` is what an FP8 cache's
// numbers are divided by. Elements that are neither rotated nor converted keep their bits.
template <class T>
DEVICE void copy_unit(const AppendParams& p, const Unit& unit, bool rotates, i64 position, const Element* from,
                      i64 from_stride, T* to, i64 to_stride, float scale) {
  using Source = Pack<Element, WIDTH>;
  using Target = Pack<T, WIDTH>;
  constexpr bool CONVERTS = sizeof(T) == 1;
  Source source[2] = {};
  source[0] = *reinterpret_cast<const Source*>(from + unit.first * from_stride);
  if (unit.has_second) source[1] = *reinterpret_cast<const Source*>(from + unit.second * from_stride);
  const bool is_rotated = rotates && unit.is_rotated;
  Accum x[UNIT];
#pragma unroll
  for (int i = 0; i < UNIT; i++) x[i] = to_accum(source[i / WIDTH].e[i % WIDTH]);
  if (is_rotated) rotate(x, p, unit, position);
  Target target[2];
#pragma unroll
  for (int i = 0; i < UNIT; i++) {
    T& place = target[i / WIDTH].e[i % WIDTH];
    if constexpr (CONVERTS) {
      place = encoded(x[i] / static_cast<Accum>(scale));
    } else {
      place = is_rotated ? from_accum<T>(x[i]) : source[i / WIDTH].e[i % WIDTH];
    }
  }
  *reinterpret_cast<Target*>(to + unit.first * to_stride) = target[0];
  if (unit.has_second) *reinterpret_cast<Target*>(to + unit.second * to_stride) = target[1];
}

DEVICE float scale_at(const Tensor<const float>& scale, const NewRow& r, int head) {
  return scale.data == nullptr ? 1.0f : *scale.at(r.outer, r.row, head);
}

// append_kv: the units of a row are those of the heads of k, then of v, then of q. One thread copies one unit.
extern "C" __global__ void __launch_bounds__(THREADS) append_kv(const AppendParams p) {
  const i64 index = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x, row = index / p.units_of_row;
  if (row >= p.rows) return;
  const NewRow r(p, row);
  int unit = static_cast<int>(index % p.units_of_row);
  const int units_of_k = p.num_heads_kv * p.units_of_head, units_of_v = p.num_heads_kv * p.units_of_head_v;
  if (unit < units_of_k) {
    if (!r.kept) return;
    const int head = unit / p.units_of_head;
    copy_unit(p, Unit(unit % p.units_of_head, p.rotary_dim, p.head_dim), true, r.position, p.k.at(r.outer, r.row, head),
              p.k.column_stride, p.k_cache.at(r.page, r.slot, head), p.k_cache.column_stride,
              scale_at(p.k_scale, r, head));
    return;
  }
  unit -= units_of_k;
  if (unit < units_of_v) {
    if (!r.kept) return;
    const int head = unit / p.units_of_head_v;
    copy_unit(p, Unit(unit % p.units_of_head_v, 0, p.head_dim_v), false, r.position, p.v.at(r.outer, r.row, head),
              p.v.column_stride, p.v_cache.at(r.page, r.slot, head), p.v_cache.column_stride,
              scale_at(p.v_scale, r, head));
    return;
  }
  unit -= units_of_v;
  const int head = unit / p.units_of_head;
  copy_unit(p, Unit(unit % p.units_of_head, p.rotary_dim, p.head_dim), r.in_use, r.position,
            p.q.at(r.outer, r.row, head), p.q.column_stride, p.q_out.at(r.outer, r.row, head), p.q_out.column_stride,
            1.0f);
}

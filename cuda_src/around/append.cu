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

// Division divides a number that is not negative. One that fits 32 bits takes a fifth of the instructions.
struct Division {
  i64 quotient;
  int rest;

  DEVICE Division(i64 x, int by) {
    if (static_cast<u64>(x) >> 32 == 0) {
      quotient = static_cast<u32>(x) / static_cast<u32>(by);
      rest = static_cast<u32>(x) % static_cast<u32>(by);
    } else {
      quotient = x / by;
      rest = static_cast<int>(x % by);
    }
  }
};

// NewRow is where one of the new rows stands in k, v and q.
struct NewRow {
  i64 outer, row;

  DEVICE NewRow(const AppendParams& p, i64 index) : outer(0), row(index) {
    if constexpr (!PACKED) {
      const Division by_sequence(index, p.seqlen);
      outer = by_sequence.quotient;
      row = by_sequence.rest;
    }
  }
};

// Place is where a new row belongs.
struct Place {
  i64 position;    // in its sequence
  i64 page, slot;  // in the caches
  bool in_use;     // it belongs to a sequence
  bool kept;       // the cache has a place for it

  DEVICE Place(const AppendParams& p, const NewRow& r) : position(0), page(0), slot(0), in_use(true), kept(false) {
    int batch = static_cast<int>(r.outer);
    i64 begin = 0;
    if constexpr (PACKED) {
      batch = sequence_at(p, static_cast<int>(r.row));
      in_use = batch >= 0 && batch < p.batch;
      if (!in_use) return;
      begin = clamped(*p.cu_seqlens.at(batch), p.seqlen);
    }
    position = *p.kv_lengths.at(batch) + r.row - begin;
    if (position < 0 || position >= p.capacity) return;
    if constexpr (PAGED) {
      const Division by_page(position, p.page_size);
      page = *p.block_table.at(batch, by_page.quotient);
      slot = by_page.rest;
      kept = page >= 0 && page < p.num_pages;
    } else {
      page = batch;
      slot = position;
      kept = true;
    }
  }

  // sequence_at() is the last sequence that begins at a packed row or before; -1 stands for the padding before all.
  DEVICE static int sequence_at(const AppendParams& p, int row) {
    int low = -1, high = p.batch;
    while (low < high) {
      const int middle = low + (high - low + 1) / 2;
      if (clamped(*p.cu_seqlens.at(middle), p.seqlen) <= row) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
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

// append_unit() copies one unit of a head into a cache, or of q into q_out. Numbers that are rotated or converted are
// computed in Accum, all others keep their bits. An FP8 cache's numbers are divided by their row's `scale`.
template <bool INTO_CACHE, bool ROTATES, class T>
DEVICE void append_unit(const AppendParams& p, i64 index, int head, const Unit& unit, const Cells<const Element>& from,
                        const Cells<T>& to, const Tensor<const float>& scale) {
  using Source = Pack<Element, WIDTH>;
  using Target = Pack<T, WIDTH>;
  const NewRow r(p, index);
  // The elements are read before the row's place is known, because finding it takes two or three dependent reads.
  const Element* columns = from.at(r.outer, r.row, head);
  Source source[2] = {};
  source[0] = *reinterpret_cast<const Source*>(columns + unit.first * from.column_stride);
  if (unit.has_second) source[1] = *reinterpret_cast<const Source*>(columns + unit.second * from.column_stride);
  const Place place(p, r);
  if (INTO_CACHE && !place.kept) return;

  const bool is_rotated = ROTATES && unit.is_rotated && place.in_use;
  Accum x[UNIT];
#pragma unroll
  for (int i = 0; i < UNIT; i++) x[i] = to_accum(source[i / WIDTH].e[i % WIDTH]);
  if (is_rotated) rotate(x, p, unit, place.position);
  Target target[2];
  const Accum divisor = scale.data == nullptr ? 1 : *scale.at(r.outer, r.row, head);
#pragma unroll
  for (int i = 0; i < UNIT; i++) {
    T& element = target[i / WIDTH].e[i % WIDTH];
    if constexpr (sizeof(T) == 1) {
      element = encoded(x[i] / divisor);
    } else {
      element = is_rotated ? from_accum<T>(x[i]) : source[i / WIDTH].e[i % WIDTH];
    }
  }
  T* row = INTO_CACHE ? to.at(place.page, place.slot, head) : to.at(r.outer, r.row, head);
  *reinterpret_cast<Target*>(row + unit.first * to.column_stride) = target[0];
  if (unit.has_second) *reinterpret_cast<Target*>(row + unit.second * to.column_stride) = target[1];
}

// append_kv has a thread for each unit; a row has the units of the heads of k, then of v, then of q.
extern "C" __global__ void __launch_bounds__(THREADS) append_kv(const AppendParams p) {
  const Division by_row(static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x, p.units_of_row);
  const i64 row = by_row.quotient;
  if (row >= p.rows) return;
  const int units_of_k = p.num_heads_kv * p.units_of_head, units_of_v = p.num_heads_kv * p.units_of_head_v;
  const bool is_v = by_row.rest >= units_of_k && by_row.rest < units_of_k + units_of_v;
  const int number = by_row.rest < units_of_k ? by_row.rest : by_row.rest - units_of_k - (is_v ? 0 : units_of_v);
  const int units = is_v ? p.units_of_head_v : p.units_of_head, head = number / units;
  const Unit unit(number % units, is_v ? 0 : p.rotary_dim, is_v ? p.head_dim_v : p.head_dim);
  if (is_v) {
    append_unit<true, false>(p, row, head, unit, p.v, p.v_cache, p.v_scale);
  } else if (by_row.rest < units_of_k) {
    append_unit<true, true>(p, row, head, unit, p.k, p.k_cache, p.k_scale);
  } else {
    append_unit<false, true>(p, row, head, unit, p.q, p.q_out, Tensor<const float>());
  }
}

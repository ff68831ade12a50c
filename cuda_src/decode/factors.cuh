// This header has the factors of a decode kernel's products. Few queries are the columns of a product by mma.sync,
// which has eight, and 16 keys are its rows: S^T = K Q^T. The values' columns are the rows of the second one: O^T = V^T
// P^T. A query's fragment stays in registers. Keys and values are read by ldmatrix, and codes become numbers of 16 bits
// there, which is exact: as each warp has keys of its own, each code is converted once.
//
// Codes: one word of ldmatrix has four. Of keys these are four neighbouring columns of a row, which a product takes in
// any order if the queries have them in the same. Of values, transposed, they are two columns of two rows: rows 2 r
// and 2 r + 1 of the product's eight (and eight further ones) are columns of even and of odd number.
#include "cache.cuh"

// Weighted is the type of weights and values as factors: over codes float16, which has more bits of a weight and takes
// a conversion less for each code. Queries and keys are `Element`, into which codes fit as well.
using Weighted = Either<HAS_FP8, __half, Element>::Type;
template <class T>
constexpr bool is_half = false;
template <>
constexpr bool is_half<__half> = true;

constexpr int COLUMNS = 8;                       // queries of a product
constexpr int QUERY_BLOCKS = BLOCK_M / COLUMNS;  // products side by side
constexpr int KEY_BLOCKS = WARP_KEYS / 16;       // products one below the other
constexpr int STEPS = HEAD_DIM / 16;             // of a product of queries and keys
constexpr int VALUE_BLOCKS = HEAD_DIM_V / 16;    // products of 16 columns of the result each
constexpr int BLOCKS_OF_READ = HAS_FP8 ? 2 : 1;  // that one ldmatrix reads the rows or the steps of
static_assert(BLOCK_M % COLUMNS == 0 && WARP_KEYS % 16 == 0 && WARP_KEYS <= WARP, "whole products");
static_assert(STEPS % BLOCKS_OF_READ == 0 && VALUE_BLOCKS % BLOCKS_OF_READ == 0, "whole reads");

// query_of() is the number of the query in the thread's element e of a product: 0 and 1 are neighbours.
DEVICE int query_of(int block, int e) { return block * COLUMNS + lane() % 4 * 2 + e % 2; }
// key_of() is the number of the key in element e of the scores, and column_of() the column in element e of a result.
DEVICE int key_of(int block, int e) { return block * 16 + lane() / 4 + e / 2 * 8; }
DEVICE int column_of(int block, int e) {
  return HAS_FP8 ? block * 16 + lane() / 4 * 2 + e / 2 : block * 16 + lane() / 4 + e / 2 * 8;
}

// read_parts() reads a word of neighbours at once, of which `left` are in the row; the others count as 0.
template <class Word, class Part>
DEVICE Word read_parts(const Part* from, int left) {
  constexpr int PARTS = sizeof(Word) / sizeof(Part), BITS = 8 * sizeof(Part);
  if (left >= PARTS) return *reinterpret_cast<const Word*>(from);
  Word word = 0;
#pragma unroll
  for (int i = 0; i < PARTS; i++) word |= i < left ? static_cast<Word>(from[i]) << i * BITS : 0;
  return word;
}

// elements_of_codes() makes the four codes of a word elements.
DEVICE void elements_of_codes(u32 (&pairs)[2], u32 codes) {
  ptx::halves_of_e4m3(pairs, codes);
#pragma unroll
  for (u32& pair : pairs) pair = element_pair(Element(), pair);
}

// QueryFactors are the queries of the thread block as factors, and the scales of the thread's two in each block.
struct QueryFactors {
  u32 words[QUERY_BLOCKS][STEPS][2];
  float scale[QUERY_BLOCKS][2];

  // This constructor reads one row for each head from `first_head` on; rows behind `num_rows` count as 0.
  DEVICE QueryFactors(const AttentionParams& p, const Sequence& s, int first_head, int num_rows) {
#pragma unroll
    for (int block = 0; block < QUERY_BLOCKS; block++) {
      const int row = block * COLUMNS + lane() / 4;
      read_row(p, s, block, first_head + row, row < num_rows);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int query = query_of(block, e);
        const bool has_scale = QUERY_CODES && p.q_scale.data != nullptr && query < num_rows;
        scale[block][e] = has_scale ? *p.q_scale.at(s.batch, 0, first_head + query) : 1;
      }
    }
  }

 private:
  // read_row() reads what a lane has of a row: four columns of each step. Over numbers they are in the order of their
  // columns two by two; over codes they are four in a row, as the keys' are.
  DEVICE void read_row(const AttentionParams& p, const Sequence& s, int block, int head, bool inside) {
    const int columns = inside ? p.head_dim : 0;
    const u8* codes = QUERY_CODES ? codes_of(p.q).at(s.batch, 0, head) : nullptr;
    const u16* numbers = QUERY_CODES ? nullptr : reinterpret_cast<const u16*>(p.q.at(s.batch, 0, head));
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      u32(&pairs)[2] = words[block][step];
      const int column = step * 16 + lane() % 4 * (HAS_FP8 ? 4 : 2);
      if constexpr (QUERY_CODES) {
        elements_of_codes(pairs, read_parts<u32>(codes + column, columns - column));
      } else if constexpr (HAS_FP8) {
        const u64 four = read_parts<u64>(numbers + column, columns - column);
        pairs[0] = static_cast<u32>(four), pairs[1] = static_cast<u32>(four >> 32);
      } else {
        pairs[0] = read_parts<u32>(numbers + column, columns - column);
        pairs[1] = read_parts<u32>(numbers + column + 8, columns - column - 8);
      }
    }
  }
};

// multiply_keys() computes x += K Q^T for the keys of a stage.
DEVICE void multiply_keys(float (&x)[QUERY_BLOCKS][KEY_BLOCKS][4], const KeyTile& keys, const QueryFactors& queries) {
#pragma unroll
  for (int read = 0; read < STEPS / BLOCKS_OF_READ; read++) {
#pragma unroll
    for (int block = 0; block < KEY_BLOCKS; block++) {
      u32 words[4];
      keys.left(words, 16 * block, read);
#pragma unroll
      for (int i = 0; i < BLOCKS_OF_READ; i++) {
        u32 a[4];
        if constexpr (HAS_FP8) {
          u32 upper[2], lower[2];  // eight rows each
          elements_of_codes(upper, words[2 * i]);
          elements_of_codes(lower, words[2 * i + 1]);
          a[0] = upper[0], a[1] = lower[0], a[2] = upper[1], a[3] = lower[1];
        } else {
          copy_words(a, words);
        }
#pragma unroll
        for (int q = 0; q < QUERY_BLOCKS; q++) {
          ptx::mma_m16n8k16<Element>(x[q][block], a, queries.words[q][read * BLOCKS_OF_READ + i]);
        }
      }
    }
  }
}

// WeightFactors are weights as factors: those of 16 keys a word pair.
using WeightFactors = u32[QUERY_BLOCKS][KEY_BLOCKS][2];

// pack_weights() rounds weights to 16 bits and transposes them, as queries are their rows from here on.
DEVICE void pack_weights(WeightFactors& to, const float (&x)[QUERY_BLOCKS][KEY_BLOCKS][4]) {
#pragma unroll
  for (int q = 0; q < QUERY_BLOCKS; q++) {
#pragma unroll
    for (int block = 0; block < KEY_BLOCKS; block++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        to[q][block][i] = ptx::movmatrix_trans(packed(Weighted(), x[q][block][2 * i], x[q][block][2 * i + 1]));
      }
    }
  }
}

// multiply_values() computes out += V^T P^T for the values of a stage.
DEVICE void multiply_values(float (&out)[QUERY_BLOCKS][VALUE_BLOCKS][4], const ValueTile& values,
                            const WeightFactors& weights) {
#pragma unroll
  for (int read = 0; read < VALUE_BLOCKS / BLOCKS_OF_READ; read++) {
#pragma unroll
    for (int block = 0; block < KEY_BLOCKS; block++) {
      u32 words[4];
      values.right(words, 16 * block, read);
#pragma unroll
      for (int i = 0; i < BLOCKS_OF_READ; i++) {
        u32 a[4];
        if constexpr (HAS_FP8) {
          u32 first[2], second[2];  // eight keys each: their even columns, and their odd ones
          ptx::halves_of_e4m3(first, __byte_perm(words[2 * i], 0, 0x3120));
          ptx::halves_of_e4m3(second, __byte_perm(words[2 * i + 1], 0, 0x3120));
          a[0] = first[0], a[1] = first[1], a[2] = second[0], a[3] = second[1];
        } else {
          a[0] = words[0], a[1] = words[2], a[2] = words[1], a[3] = words[3];
        }
#pragma unroll
        for (int q = 0; q < QUERY_BLOCKS; q++) {
          ptx::mma_m16n8k16<Weighted>(out[q][read * BLOCKS_OF_READ + i], a, weights[q][block]);
        }
      }
    }
  }
}

// This header has what a thread block of the kernels of gradients.cuh holds: the tiles of rows and of columns, and what
// shared memory has of them.
#include "products"
#include "../fragment/score_gradient.cuh"
#include "../fragment/softmax_fragment.cuh"

constexpr int FRAGMENT_COLUMNS = (OF_KEYS ? BLOCK_M : BLOCK_N) / KEY_WARPS, FRAGMENT = FRAGMENT_COLUMNS / 2;
using Scores = ScoreGradient<OF_KEYS, FRAGMENT>;
using ColumnIterator = ColumnIteratorOf<OF_KEYS, QueryTileIterator>::Type;

// KEY_WARPS warps have the same rows, and each a part of the columns.
constexpr int ROWS = OF_KEYS ? BLOCK_N : BLOCK_M, COLUMNS = KEY_WARPS * FRAGMENT_COLUMNS;
constexpr int FRAGMENTS = ROWS * KEY_WARPS / (NUM_WARPS * 16);
constexpr int OWN_DIM = HEAD_DIM / KEY_WARPS;
static_assert(KEY_WARPS == 1 || HEAD_DIM == HEAD_DIM_V, "keys and values are divided alike");
static_assert(OF_KEYS == (COMPUTES_DK || COMPUTES_DV), "dk, dv, both, or dq");
static_assert(ROWS * KEY_WARPS == FRAGMENTS * NUM_WARPS * 16, "whole fragments");
// NEEDS_GRADIENTS: dv alone needs no gradients of scores.
constexpr bool NEEDS_GRADIENTS = !OF_KEYS || COMPUTES_DK;
// ALTERNATES_OPERANDS: float64's warps that share rows have a buffer of their own for exchanging results, and load one
// operand while they multiply the other.
constexpr bool ALTERNATES_OPERANDS = KEY_WARPS > 1 && sizeof(Accum) == 8,
               LAST_KEYED = !(ALTERNATES_OPERANDS && COMPUTES_DV), LAST_VALUED = !ALTERNATES_OPERANDS || COMPUTES_DV;
static_assert(!ALTERNATES_OPERANDS || (STAGES == 1 && FRAGMENTS == 1 && !(COMPUTES_DK && COMPUTES_DV)),
              "one product is exchanged a tile");
static_assert(KEY_WARPS == 1 || ALTERNATES_OPERANDS || HEAD_DIM >= 2 * ROWS, "room for the exchange");
// Rows are q and dout, or k and v; columns are k and v, or q and dout.
using RowTile = KeyedTile<ROWS, HEAD_DIM>;
using RowTileV = ValuedTile<ROWS, HEAD_DIM_V>;
using ColumnTile = KeyedTile<COLUMNS, HEAD_DIM>;
using ColumnTileV = ValuedTile<COLUMNS, HEAD_DIM_V>;

struct SharedStorage {
  alignas(128) unsigned char rows[RowTile::BYTES];                            // q or k: (ROWS, HEAD_DIM)
  alignas(128) unsigned char rows_v[NEEDS_GRADIENTS ? RowTileV::BYTES : 16];  // dout or v: (ROWS, HEAD_DIM_V)
  alignas(128) unsigned char columns[STAGES * ColumnTile::BYTES];             // k or q: (STAGES, COLUMNS, HEAD_DIM)
  alignas(128) unsigned char columns_v[STAGES * ColumnTileV::BYTES];  // v or dout: (STAGES, COLUMNS, HEAD_DIM_V)
  Accum lse[STAGES][COLUMNS], delta[STAGES][COLUMNS];  // lse and delta of the columns, if they are queries
  Work work;                                           // read again and again, because registers are scarce
  Factors<ROWS, 1> row_factors;
  Factors<COLUMNS, STAGES> factors;
  u8 seen[HIDES_ANYWHERE ? COLUMNS : 1];
  Accum exchange[ALTERNATES_OPERANDS ? ROWS * COLUMNS : 1];  // scores that warps with the same rows exchange
};

// WarpPlace is where a warp works: its rows of the tile, and its parts of the columns and of the results.
struct WarpPlace {
  const int tile_row;             // the first row of the tile
  const int warp;                 // the warp's number in the thread block
  const int warp_row, first_row;  // the warp's first row in the tile, and in the sequence
  const int own_column, own_dim;  // its first column of a tile of columns, and of the results
  const int own_row;              // the thread's first row in the sequence
};

// KEYED_GRADIENT and VALUED_GRADIENT are how many numbers a thread has of a fragment of dq or dk, and of dv. 4 stands
// for a result that is not computed, because arrays must have a size.
constexpr int KEYED_GRADIENT = NEEDS_GRADIENTS ? OWN_DIM / 2 : 4;
constexpr int VALUED_GRADIENT = COMPUTES_DV ? HEAD_DIM_V / KEY_WARPS / 2 : 4;

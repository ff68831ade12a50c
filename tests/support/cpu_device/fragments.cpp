// Fragments: matrices whose elements are spread over the registers of a warp. With g = lane / 4 and t = lane % 4.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cut_sums.h"
#include "formats.h"
#include "instructions.h"
#include "worker.h"

namespace cpu_device {

namespace {

constexpr int kRowBytes = 16;  // of an 8x8 matrix of 16-bit elements

struct LoadArgs {
  unsigned* d;
  int count;
  bool transposed;
  uint32_t address;
  Where where;
};

struct StoreArgs {
  uint32_t address;
  const unsigned* a;
  int count;
  bool transposed;
  Where where;
};

// Row `row` of matrix `matrix` is at the address of lane 8 * matrix + row.
template <class Args>
unsigned char* matrix_row(void* const all[32], int matrix, int row, const char* name) {
  const Args& args = *static_cast<Args*>(all[8 * matrix + row]);
  return shared_memory(args.address, kRowBytes, kRowBytes, name, args.where);
}

void load_operation(void* const all[32], unsigned) {
  const LoadArgs& first = *static_cast<LoadArgs*>(all[0]);
  for (int m = 0; m < first.count; m++) {
    uint16_t matrix[8][8];
    for (int row = 0; row < 8; row++) {
      const unsigned char* from = matrix_row<LoadArgs>(all, m, row, "ldmatrix");
      on_read(from, kRowBytes, first.where);
      memcpy(matrix[row], from, kRowBytes);
    }
    for (int l = 0; l < 32; l++) {
      const int g = l / 4, t = l % 4;
      const uint16_t low = first.transposed ? matrix[2 * t][g] : matrix[g][2 * t];
      const uint16_t high = first.transposed ? matrix[2 * t + 1][g] : matrix[g][2 * t + 1];
      static_cast<LoadArgs*>(all[l])->d[m] = low | uint32_t(high) << 16;
    }
  }
}

void store_operation(void* const all[32], unsigned) {
  const StoreArgs& first = *static_cast<StoreArgs*>(all[0]);
  for (int m = 0; m < first.count; m++) {
    uint16_t matrix[8][8];
    for (int l = 0; l < 32; l++) {
      const int g = l / 4, t = l % 4;
      const unsigned word = static_cast<StoreArgs*>(all[l])->a[m];
      (first.transposed ? matrix[2 * t][g] : matrix[g][2 * t]) = word;
      (first.transposed ? matrix[2 * t + 1][g] : matrix[g][2 * t + 1]) = word >> 16;
    }
    for (int row = 0; row < 8; row++) {
      unsigned char* to = matrix_row<StoreArgs>(all, m, row, "stmatrix");
      on_write(to, kRowBytes, first.where);
      memcpy(to, matrix[row], kRowBytes);
    }
  }
}

struct TransposeArgs {
  unsigned a, d;
};

void transpose_operation(void* const all[32], unsigned) {
  uint16_t matrix[8][8];
  for (int l = 0; l < 32; l++) memcpy(&matrix[l / 4][l % 4 * 2], &static_cast<TransposeArgs*>(all[l])->a, 4);
  for (int l = 0; l < 32; l++)
    static_cast<TransposeArgs*>(all[l])->d = matrix[l % 4 * 2][l / 4] | uint32_t(matrix[l % 4 * 2 + 1][l / 4]) << 16;
}

struct MultiplyArgs {
  float* d;
  const unsigned *a, *b;
  int depth;
};

int row_of(int lane, int r) { return lane / 4 + r / 2 * 8; }
int column_of(int lane, int r) { return lane % 4 * 2 + r % 2; }

template <Format format>
void multiply_operation(void* const all[32], unsigned) {
  // A lane has `pack` neighbouring elements of a row of a in a register, and registers with the next 4 * pack columns.
  constexpr int pack = 4 / kElementBytes<format>, span = 4 * pack, columns = 8;
  const int depth = static_cast<MultiplyArgs*>(all[0])->depth;
  float a[kMaxDepth * kRows], b[kMaxDepth * columns], d[kRows * columns];
  for (int l = 0; l < 32; l++) {
    const MultiplyArgs& args = *static_cast<MultiplyArgs*>(all[l]);
    const auto *of_a = reinterpret_cast<const uint8_t*>(args.a), *of_b = reinterpret_cast<const uint8_t*>(args.b);
    const int g = l / 4, t = l % 4;
    for (int r = 0; r < depth / span; r++) {
      for (int i = 0; i < pack; i++) {
        const int k = pack * t + i + r * span, at = i * kElementBytes<format>;
        for (int half = 0; half < 2; half++)
          a[k * kRows + g + half * 8] = element<format>(of_a + 8 * r + 4 * half + at);
        b[k * columns + g] = element<format>(of_b + 4 * r + at);
      }
    }
    for (int r = 0; r < 4; r++) d[row_of(l, r) * columns + column_of(l, r)] = args.d[r];
  }
  multiply(d, true, a, b, columns, depth, {worker->launch->sum_bits, worker->launch->sum_depth}, format);
  for (int l = 0; l < 32; l++)
    for (int r = 0; r < 4; r++) static_cast<MultiplyArgs*>(all[l])->d[r] = d[row_of(l, r) * columns + column_of(l, r)];
}

struct MultiplyDoubleArgs {
  double* d;
  double a, b;
};

void multiply_double_operation(void* const all[32], unsigned) {
  constexpr int size = 8, depth = 4;  // a is (size x depth), b (depth x size)
  double b[depth][size];
  for (int l = 0; l < 32; l++) b[l % depth][l / depth] = static_cast<MultiplyDoubleArgs*>(all[l])->b;
  for (int row = 0; row < size; row++) {
    double sums[size];
    for (int column = 0; column < size; column++)
      sums[column] = static_cast<MultiplyDoubleArgs*>(all[4 * row + column / 2])->d[column % 2];
    for (int k = 0; k < depth; k++) {
      const double x = static_cast<MultiplyDoubleArgs*>(all[depth * row + k])->a;
      for (int column = 0; column < size; column++) sums[column] = __builtin_fma(x, b[k][column], sums[column]);
    }
    for (int column = 0; column < size; column++)
      static_cast<MultiplyDoubleArgs*>(all[4 * row + column / 2])->d[column % 2] = sums[column];
  }
}

}  // namespace

float e4m3_to_float(uint8_t code) { return numbers.of_codes[code]; }

uint8_t float_to_e4m3(float x) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return sign | 0x7f;
  const float size = std::fabs(x);
  if (size >= 448) return sign | 0x7e;
  const int exponent = std::max(size == 0 ? -6 : std::ilogb(size), -6);
  // In units of the last place, of which a normal number has eight or more; sixteen are the next exponent's eight.
  const int units = int(std::nearbyint(std::ldexp(size, 3 - exponent)));
  return sign | uint8_t((exponent + 6) * 8 + units);
}

void load_matrices(unsigned* d, int count, bool transposed, uint32_t address, Where where) {
  LoadArgs args{d, count, transposed, address, where};
  warp_collective(~0u, load_operation, &args, "ldmatrix", where);
}

void store_matrices(uint32_t address, const unsigned* a, int count, bool transposed, Where where) {
  StoreArgs args{address, a, count, transposed, where};
  warp_collective(~0u, store_operation, &args, "stmatrix", where);
}

unsigned transpose_matrix(unsigned a, Where where) {
  TransposeArgs args{a, 0};
  warp_collective(~0u, transpose_operation, &args, "movmatrix", where);
  return args.d;
}

void multiply_fragments(float* d, const unsigned* a, const unsigned* b, int depth, Format format, Where where) {
  MultiplyArgs args{d, a, b, depth};
  const WarpOperation operation = format == Format::kFloat16    ? multiply_operation<Format::kFloat16>
                                  : format == Format::kBfloat16 ? multiply_operation<Format::kBfloat16>
                                                                : multiply_operation<Format::kE4m3>;
  warp_collective(~0u, operation, &args, "mma", where);
}

void multiply_fragments(double* d, double a, double b, Where where) {
  MultiplyDoubleArgs args{d, a, b};
  warp_collective(~0u, multiply_double_operation, &args, "mma", where);
}

}  // namespace cpu_device

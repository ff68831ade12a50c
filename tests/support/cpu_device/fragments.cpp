// Fragments: matrices whose elements are spread over the registers of a warp. With g = lane / 4 and t = lane % 4.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cut_sums.h"
#include "instructions.h"
#include "worker.h"

namespace cpu_device {

namespace {

constexpr int kRowBytes = 16;  // of an 8x8 matrix of 16-bit elements

float half_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 0x1f, mantissa = bits & 0x3ff;
  float value;
  if (exponent == 0) {
    value = float(mantissa) * 0x1p-24f;
  } else {
    const uint32_t word = (exponent == 0x1f ? 0xffu : exponent + 127 - 15) << 23 | mantissa << 13;
    memcpy(&value, &word, sizeof value);
  }
  return sign ? -value : value;
}

// All 2^16 of them: conversions are most of the work of the products below.
struct HalfTable {
  float values[1 << 16];
  HalfTable() {
    for (unsigned bits = 0; bits < 1u << 16; bits++) values[bits] = half_to_float(bits);
  }
};

float from_bits(uint32_t word) {
  float value;
  memcpy(&value, &word, sizeof value);
  return value;
}

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
  Format format;
};

// Element `i` of a register, which has two of 16 bits or four codes.
float element(unsigned word, int i, Format format) {
  return format == Format::kE4m3 ? e4m3_to_float(word >> 8 * i) : to_float(word >> 16 * i, format);
}

void multiply_operation(void* const all[32], unsigned) {
  const MultiplyArgs& first = *static_cast<MultiplyArgs*>(all[0]);
  const Format format = first.format;
  // A lane has `pack` neighbouring elements of a row of a in a register, and registers with the next 4 * pack columns.
  const int pack = format == Format::kE4m3 ? 4 : 2, span = 4 * pack;
  float a[16][32], b[32][8];
  for (int l = 0; l < 32; l++) {
    const MultiplyArgs& args = *static_cast<MultiplyArgs*>(all[l]);
    const int g = l / 4, t = l % 4;
    for (int r = 0; r < 2 * first.depth / span; r++)
      for (int i = 0; i < pack; i++) a[g + r % 2 * 8][pack * t + i + r / 2 * span] = element(args.a[r], i, format);
    for (int r = 0; r < first.depth / span; r++)
      for (int i = 0; i < pack; i++) b[pack * t + i + r * span][g] = element(args.b[r], i, format);
  }
  for (int l = 0; l < 32; l++) {
    float* d = static_cast<MultiplyArgs*>(all[l])->d;
    for (int r = 0; r < 4; r++) {
      const int row = l / 4 + r / 2 * 8, column = l % 4 * 2 + r % 2;
      if (worker->launch->sum_bits > 0) {
        d[r] = sum_of_products(d[r], a[row], 1, &b[0][column], 8, first.depth, format);
        continue;
      }
      float sum = 0;
      for (int k = 0; k < first.depth; k++) sum += a[row][k] * b[k][column];
      d[r] += sum;
    }
  }
}

struct MultiplyDoubleArgs {
  double* d;
  double a, b;
};

void multiply_double_operation(void* const all[32], unsigned) {
  for (int l = 0; l < 32; l++) {
    double* d = static_cast<MultiplyDoubleArgs*>(all[l])->d;
    for (int r = 0; r < 2; r++)
      for (int k = 0; k < 4; k++) {
        const int row = l / 4, column = l % 4 * 2 + r;
        d[r] = __builtin_fma(static_cast<MultiplyDoubleArgs*>(all[4 * row + k])->a,
                             static_cast<MultiplyDoubleArgs*>(all[4 * column + k])->b, d[r]);
      }
  }
}

}  // namespace

float to_float(uint16_t bits, Format format) {
  static const HalfTable table;
  return format == Format::kBfloat16 ? from_bits(uint32_t(bits) << 16) : table.values[bits];
}

float e4m3_to_float(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  float size = exponent == 0 ? std::ldexp(float(mantissa), -9) : std::ldexp(8.0f + mantissa, exponent - 10);
  if ((code & 0x7f) == 0x7f) size = from_bits(0x7fc00000);
  return std::copysign(size, code & 0x80 ? -1.0f : 1.0f);
}

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
  MultiplyArgs args{d, a, b, depth, format};
  warp_collective(~0u, multiply_operation, &args, "mma", where);
}

void multiply_fragments(double* d, double a, double b, Where where) {
  MultiplyDoubleArgs args{d, a, b};
  warp_collective(~0u, multiply_double_operation, &args, "mma", where);
}

}  // namespace cpu_device

// The functions of cuda_src/sm80/ptx.cuh for the CPU.
#pragma once
#include <cmath>
#include <cstring>
#include <type_traits>

#include "instructions.h"

namespace ptx {

using cpu_device::Where;

template <class T>
constexpr cpu_device::Format format =
    std::is_same<T, __nv_bfloat16>::value ? cpu_device::Format::kBfloat16 : cpu_device::Format::kFloat16;

inline unsigned shared_address(const void* pointer, Where where = {}) {
  return cpu_device::shared_address(pointer, where);
}

inline void ldmatrix_x4(unsigned (&d)[4], unsigned address, Where where = {}) {
  cpu_device::load_matrices(d, 4, false, address, where);
}
inline void ldmatrix_x4_trans(unsigned (&d)[4], unsigned address, Where where = {}) {
  cpu_device::load_matrices(d, 4, true, address, where);
}
inline void ldmatrix_x2(unsigned (&d)[2], unsigned address, Where where = {}) {
  cpu_device::load_matrices(d, 2, false, address, where);
}
inline void ldmatrix_x2_trans(unsigned (&d)[2], unsigned address, Where where = {}) {
  cpu_device::load_matrices(d, 2, true, address, where);
}
inline unsigned movmatrix_trans(unsigned a, Where where = {}) { return cpu_device::transpose_matrix(a, where); }

template <bool WHOLE_LINES = false>
inline void cp_async_16(unsigned shared, const void* global, int bytes, Where where = {}) {
  cpu_device::copy_async(shared, global, 16, bytes, where);
}
inline void cp_async_8(unsigned shared, const void* global, int bytes, Where where = {}) {
  cpu_device::copy_async(shared, global, 8, bytes, where);
}
inline void cp_async_4(unsigned shared, const void* global, int bytes, Where where = {}) {
  cpu_device::copy_async(shared, global, 4, bytes, where);
}
inline void cp_async_commit_group() { cpu_device::copy_async_commit(); }
template <int PENDING>
void cp_async_wait_group() {
  cpu_device::copy_async_wait(PENDING);
}

template <class T>
void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], Where where = {}) {
  cpu_device::multiply_fragments(d, a, b, 16, format<T>, where);
}
inline void mma_m16n8k8_f16(float (&d)[4], const unsigned (&a)[2], unsigned b, Where where = {}) {
  cpu_device::multiply_fragments(d, a, &b, 8, cpu_device::Format::kFloat16, where);
}
inline void mma_m16n8k32_e4m3(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], Where where = {}) {
  cpu_device::multiply_fragments(d, a, b, 32, cpu_device::Format::kE4m3, where);
}
inline void mma_m8n8k4_f64(double (&d)[2], double a, double b, Where where = {}) {
  cpu_device::multiply_fragments(d, a, b, where);
}
inline void mma_m16n8k8_f64(double (&d)[4], const double (&a)[4], const double (&b)[2], Where where = {}) {
  for (int row = 0; row < 2; row++) {
    double half[2] = {d[2 * row], d[2 * row + 1]};
    for (int step = 0; step < 2; step++) cpu_device::multiply_fragments(half, a[2 * step + row], b[step], where);
    d[2 * row] = half[0], d[2 * row + 1] = half[1];
  }
}

inline float multiply(float a, float b) { return a * b; }
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline void multiply_below(float& x, float& y, unsigned word, unsigned limits, float factor) {
  if ((word & 0xffff) < (limits & 0xffff)) x = flushed(flushed(x) * factor);
  if (word >> 16 < limits >> 16) y = flushed(flushed(y) * factor);
}
template <class T>
unsigned packed_positive(float low, float high) {
  const T pair[2] = {T(low <= 0 ? 0 : low), T(high <= 0 ? 0 : high)};
  unsigned y;
  std::memcpy(&y, pair, sizeof(y));
  return y;
}
inline void halves_of_e4m3(unsigned (&halves)[2], unsigned codes) {
  for (int i = 0; i < 2; i++) {
    __half pair[2];
    for (int side = 0; side < 2; side++) pair[side] = __half(cpu_device::e4m3_to_float(codes >> (16 * i + 8 * side)));
    std::memcpy(&halves[i], pair, sizeof(pair));
  }
}
inline unsigned e4m3_of(float x0, float x1, float x2, float x3) {
  const float x[4] = {x0, x1, x2, x3};
  unsigned codes = 0;
  for (int i = 0; i < 4; i++) codes |= unsigned(cpu_device::float_to_e4m3(x[i])) << 8 * i;
  return codes;
}
inline float ex2(float x) { return flushed(std::exp2(flushed(x))); }
inline float lg2(float x) { return std::log2(flushed(x)); }
inline float tanh(float x) { return std::tanh(x); }

inline void barrier_sync(int id, int threads, Where where = {}) {
  cpu_device::barrier_sync(id, threads, false, "barrier.sync", where);
}
inline void barrier_arrive(int id, int threads, Where where = {}) { cpu_device::barrier_arrive(id, threads, where); }

inline int load_acquire(const int* address, Where where = {}) { return cpu_device::load_acquire(address, where); }
inline int load_volatile(const int* address, Where where = {}) { return cpu_device::load_volatile(address, where); }
inline void add_release(int* address, int value) { cpu_device::add_release(address, value); }

}  // namespace ptx

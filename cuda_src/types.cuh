// Number types, vectors of 16 bytes, and the few scalar functions that differ between float and double.
//
// The generated constants in front of every source define `Element` (dtype of q, k, v) and `Accum` (float, or double
// for double), in which all arithmetic is done.
#pragma once

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// Elements that one 16-byte access moves.
constexpr int VECTOR = 16 / sizeof(Element);

struct alignas(16) Vector {
  Element e[VECTOR];
};

__device__ __forceinline__ float to_accum(float x) { return x; }
__device__ __forceinline__ double to_accum(double x) { return x; }
__device__ __forceinline__ float to_accum(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_accum(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_accum(Accum x);
template <>
__device__ __forceinline__ float from_accum<float>(Accum x) {
  return static_cast<float>(x);
}
template <>
__device__ __forceinline__ double from_accum<double>(Accum x) {
  return static_cast<double>(x);
}
template <>
__device__ __forceinline__ __half from_accum<__half>(Accum x) {
  return __float2half_rn(static_cast<float>(x));
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_accum<__nv_bfloat16>(Accum x) {
  return __float2bfloat16_rn(static_cast<float>(x));
}

template <class T>
struct Limits;
template <>
struct Limits<float> {
  static __device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
};
template <>
struct Limits<double> {
  static __device__ __forceinline__ double infinity() { return __longlong_as_double(0x7ff0000000000000ll); }
};

__device__ __forceinline__ Accum infinity() { return Limits<Accum>::infinity(); }

__device__ __forceinline__ float exp_2(float x) { return exp2f(x); }
__device__ __forceinline__ double exp_2(double x) { return exp2(x); }
__device__ __forceinline__ float log_e(float x) { return logf(x); }
__device__ __forceinline__ double log_e(double x) { return log(x); }
__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }

__device__ __forceinline__ int larger(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int smaller(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr Accum LOG2_E = 1.4426950408889634;

// The CPU test device: what CUDA C++ has and g++ has not. Included ahead of every kernel's text.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include "ptx_sm90.h"
#include "runtime.h"

#undef __forceinline__
#undef __noinline__
#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __grid_constant__
#undef __launch_bounds__
#undef __cluster_dims__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __global__
#define __device__
#define __host__
#define __constant__ const
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#undef __restrict__
#define __restrict__ __restrict
#undef __align__
#define __align__(n) alignas(n)
#define OFFSET_OF(type, member) __builtin_offsetof(type, member)

#define threadIdx (::cpu_device::current->thread_index)
#define blockIdx (::cpu_device::current->block_index)
#define blockDim (::cpu_device::shape->block)
#define gridDim (::cpu_device::shape->grid)
#define warpSize 32

// translate.py rewrites `__shared__ T name[n];` and `extern __shared__ T name[];` into these two.
#define CPU_DEVICE_STATIC_SHARED(name, alignment, ...) \
  struct name##_identity {};                           \
  using name##_type = __VA_ARGS__;                     \
  auto& name = *static_cast<name##_type*>(             \
      ::cpu_device::static_shared(::cpu_device::static_slot<name##_identity>, sizeof(name##_type), alignment))
#define CPU_DEVICE_DYNAMIC_SHARED(name, ...) auto* name = static_cast<__VA_ARGS__*>(::cpu_device::dynamic_shared())

namespace cpu_device {
template <class Identity>
const int static_slot = new_static_slot();  // initialised when the kernel is loaded
}

using cpu_device::Where;

// Barriers and fences

inline void __syncthreads(Where where = {}) { cpu_device::barrier_sync(0, 0, false, "__syncthreads", where); }
inline int __syncthreads_or(int p, Where where = {}) {
  return cpu_device::barrier_sync(0, 0, p != 0, "__syncthreads_or", where).any;
}
inline int __syncthreads_and(int p, Where where = {}) {
  return cpu_device::barrier_sync(0, 0, p != 0, "__syncthreads_and", where).all;
}
inline int __syncthreads_count(int p, Where where = {}) {
  return cpu_device::barrier_sync(0, 0, p != 0, "__syncthreads_count", where).count;
}
inline void __threadfence() { cpu_device::memory_fence(); }
inline void __threadfence_block() {}
inline void __threadfence_system() { __threadfence(); }
inline void __nanosleep(unsigned, Where where = {}) { cpu_device::poll("__nanosleep", where); }

// Warp collectives

inline void __syncwarp(unsigned mask = ~0u, Where where = {}) { cpu_device::warp_sync(mask, where); }
inline unsigned __activemask() { return cpu_device::existing_lanes(); }

namespace cpu_device {

template <class T>
struct Shuffle {
  T value, result;
  int source;  // lane to read; out of the segment: the own one
};

template <class T>
T shuffle(unsigned mask, T value, int source, const char* name, Where where) {
  static_assert(std::is_trivially_copyable<T>::value, "shuffles move plain bytes");
  Shuffle<T> args{value, value, source};
  warp_collective(
      mask,
      [](void* const all[32], unsigned mask) {
        for (int l = 0; l < 32; l++) {
          if (!(mask >> l & 1)) continue;
          auto* mine = static_cast<Shuffle<T>*>(all[l]);
          if (!(mask >> mine->source & 1)) fail({}, "a shuffle reads lane %d, which takes no part", mine->source);
          mine->result = static_cast<const Shuffle<T>*>(all[mine->source])->value;
        }
      },
      &args, name, where);
  return args.result;
}

struct Vote {
  bool predicate;
  unsigned ballot;
};

inline unsigned ballot(unsigned mask, bool predicate, const char* name, Where where) {
  Vote args{predicate, 0};
  warp_collective(
      mask,
      [](void* const all[32], unsigned mask) {
        unsigned bits = 0;
        for (int l = 0; l < 32; l++)
          if (mask >> l & 1) bits |= unsigned(static_cast<Vote*>(all[l])->predicate) << l;
        for (int l = 0; l < 32; l++)
          if (mask >> l & 1) static_cast<Vote*>(all[l])->ballot = bits;
      },
      &args, name, where);
  return args.ballot;
}

}  // namespace cpu_device

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, Where where = {}) {
  const int self = cpu_device::lane(), base = self & ~(width - 1);
  return cpu_device::shuffle(mask, value, base | (source & (width - 1)), "__shfl_sync", where);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, Where where = {}) {
  const int self = cpu_device::lane(), end = (self & ~(width - 1)) + width, source = self ^ lanes;
  return cpu_device::shuffle(mask, value, source < end ? source : self, "__shfl_xor_sync", where);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, Where where = {}) {
  const int self = cpu_device::lane(), source = self - int(delta);
  return cpu_device::shuffle(mask, value, source >= (self & ~(width - 1)) ? source : self, "__shfl_up_sync", where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, Where where = {}) {
  const int self = cpu_device::lane(), end = (self & ~(width - 1)) + width, source = self + int(delta);
  return cpu_device::shuffle(mask, value, source < end ? source : self, "__shfl_down_sync", where);
}
inline unsigned __ballot_sync(unsigned mask, int p, Where where = {}) {
  return cpu_device::ballot(mask, p != 0, "__ballot_sync", where);
}
inline int __any_sync(unsigned mask, int p, Where where = {}) {
  return cpu_device::ballot(mask, p != 0, "__any_sync", where) != 0;
}
inline int __all_sync(unsigned mask, int p, Where where = {}) {
  return cpu_device::ballot(mask, p != 0, "__all_sync", where) == mask;
}
#define CPU_DEVICE_REDUCE(name, T, init, combine)                      \
  inline T name(unsigned mask, T value, Where where = {}) {            \
    T total = init;                                                    \
    for (int l = 0; l < 32; l++)                                       \
      if (mask >> l & 1) {                                             \
        const T x = cpu_device::shuffle(mask, value, l, #name, where); \
        total = combine;                                               \
      }                                                                \
    return total;                                                      \
  }
CPU_DEVICE_REDUCE(__reduce_or_sync, unsigned, 0u, total | x)
CPU_DEVICE_REDUCE(__reduce_and_sync, unsigned, ~0u, total& x)
CPU_DEVICE_REDUCE(__reduce_add_sync, unsigned, 0u, total + x)
CPU_DEVICE_REDUCE(__reduce_max_sync, int, INT_MIN, x > total ? x : total)
CPU_DEVICE_REDUCE(__reduce_min_sync, int, INT_MAX, x < total ? x : total)

// Atomics and loads. Blocks run on several OS threads, so these are real ones.

// Not instrumented: the checks hear of it by on_atomic.
template <class T, class F>
__attribute__((noinline, no_sanitize("thread"))) T cpu_device_update(T* address, Where where, F f) {
  cpu_device::on_atomic(address, sizeof(T), where);
  T old, desired;
  __atomic_load(address, &old, __ATOMIC_SEQ_CST);
  do desired = f(old);
  while (!__atomic_compare_exchange(address, &old, &desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
  return old;
}
#define CPU_DEVICE_ATOMIC(name, result)                                         \
  template <class T>                                                            \
  T name(T* address, std::common_type_t<T> x, Where where = {}) {               \
    return cpu_device_update(address, where, [=](T old) { return T(result); }); \
  }
CPU_DEVICE_ATOMIC(atomicAdd, old + x)
CPU_DEVICE_ATOMIC(atomicSub, old - x)
CPU_DEVICE_ATOMIC(atomicMax, x > old ? x : old)
CPU_DEVICE_ATOMIC(atomicMin, x < old ? x : old)
CPU_DEVICE_ATOMIC(atomicExch, ((void)old, x))
CPU_DEVICE_ATOMIC(atomicOr, old | x)
CPU_DEVICE_ATOMIC(atomicAnd, old& x)
namespace ptx {
inline void add_f32_x4(float* global, float a, float b, float c, float d, Where where = {}) {
  const float x[] = {a, b, c, d};
  for (int i = 0; i < 4; i++) atomicAdd(global + i, x[i], where);
}
}  // namespace ptx
CPU_DEVICE_ATOMIC(atomicXor, old ^ x)
CPU_DEVICE_ATOMIC(atomicInc, old >= x ? 0 : old + 1)
template <class T>
T atomicCAS(T* address, std::common_type_t<T> expected, std::common_type_t<T> x, Where where = {}) {
  return cpu_device_update(address, where, [=](T old) { return old == expected ? x : old; });
}
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, std::common_type_t<T> x) {
  *p = x;
}
template <class T>
void __stcg(T* p, std::common_type_t<T> x) {
  *p = x;
}

inline size_t __cvta_generic_to_shared(const void* p, Where where = {}) { return cpu_device::shared_address(p, where); }
inline size_t __cvta_generic_to_global(const void* p) { return reinterpret_cast<size_t>(p); }
inline void* __cvta_shared_to_generic(size_t a, Where where = {}) {
  return cpu_device::shared_memory(uint32_t(a), 1, 1, "__cvta_shared_to_generic", where);
}
inline long long clock64() { return 0; }

[[noreturn]] inline void __trap(Where where = {}) { cpu_device::fail(where, "__trap"); }
#undef assert
#define assert(condition) ((condition) ? (void)0 : cpu_device::fail({}, "assertion failed: %s", #condition))

// Bits and integers

template <class To, class From>
To cpu_device_bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}
inline unsigned __float_as_uint(float x) { return cpu_device_bits<unsigned>(x); }
inline int __float_as_int(float x) { return cpu_device_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return cpu_device_bits<float>(x); }
inline float __int_as_float(int x) { return cpu_device_bits<float>(x); }
inline long long __double_as_longlong(double x) { return cpu_device_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return cpu_device_bits<double>(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)(a)*b >> 32; }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int byte = 0; byte < 32; byte += 8) c += (a >> byte & 0xff) * (b >> byte & 0xff);
  return c;
}
inline int __mulhi(int a, int b) { return (long long)(a)*b >> 32; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned __int128)(a)*b >> 64;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline unsigned __brev(unsigned x) {
  unsigned y = 0;
  for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
  return y;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = (unsigned long long)(b) << 32 | a;
  unsigned y = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned s = selector >> 4 * i & 0xf, byte = both >> 8 * (s & 7) & 0xff;
    y |= (s & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << 8 * i;
  }
  return y;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) {
  return ((unsigned long long)(high) << 32 | low) << (n & 31) >> 32;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
  return ((unsigned long long)(high) << 32 | low) >> (n & 31);
}
template <class A, class B>
using cpu_device_common_integer =
    std::enable_if_t<std::is_integral<A>::value && std::is_integral<B>::value, std::common_type_t<A, B>>;
template <class A, class B>
cpu_device_common_integer<A, B> min(A a, B b) {
  using C = std::common_type_t<A, B>;
  return C(a) < C(b) ? C(a) : C(b);
}
template <class A, class B>
cpu_device_common_integer<A, B> max(A a, B b) {
  using C = std::common_type_t<A, B>;
  return C(a) > C(b) ? C(a) : C(b);
}
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// Floating point. The approximate intrinsics are the accurate functions here.

inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __tanhf(float x) { return tanhf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) {
  volatile float p = a * b;
  return p;
}  // never contracted
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) {
  volatile double p = a * b;
  return p;
}
inline double __ddiv_rn(double a, double b) { return a / b; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0), 1); }
inline int __float2int_rn(float x) { return int(nearbyintf(x)); }
inline int __float2int_rz(float x) { return int(x); }
inline int __float2int_rd(float x) { return int(floorf(x)); }
inline int __float2int_ru(float x) { return int(ceilf(x)); }
inline unsigned __float2uint_rz(float x) { return unsigned(x); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline double __int2double_rn(int x) { return x; }
inline float __double2float_rn(double x) { return float(x); }

// Launching: the launcher of a kernel, appended by device.py, reads the parameter types off its signature.

namespace cpu_device {

template <class... P, size_t... I>
void invoke_with(void (*kernel)(P...), void** args, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_cv_t<std::remove_reference_t<P>>*>(args[I])...);
}
template <class... P>
void invoke(void (*kernel)(P...), void** args) {
  invoke_with(kernel, args, std::index_sequence_for<P...>{});
}
// Writes the size of each parameter; returns how many there are.
template <class... P>
int parameter_sizes(void (*)(P...), size_t* sizes) {
  for (size_t size : {size_t(0), sizeof(P)...})
    if (size) *sizes++ = size;
  return sizeof...(P);
}

// Where padding lies is what g++ alone tells.
#if defined(__has_builtin)
#if __has_builtin(__builtin_clear_padding)
#define CPU_DEVICE_KNOWS_PADDING 1
#endif
#endif
template <class T>
void clear_padding(T& member) {
  if constexpr (std::is_array<T>::value) {  // element by element, as g++ 12 loses its place in large ones
    for (auto& element : member) clear_padding(element);
  } else if constexpr (std::is_class<T>::value) {
#if defined(CPU_DEVICE_KNOWS_PADDING)
    __builtin_clear_padding(&member);
#endif
  }
}

}  // namespace cpu_device

#define CPU_DEVICE_ENTRY(name, ...)                                                                                \
  extern "C" void cpu_device_invoke_##name(void** args) { cpu_device::invoke(&name, args); }                       \
  extern "C" int cpu_device_parameters_##name(size_t* sizes) { return cpu_device::parameter_sizes(&name, sizes); } \
  extern "C" const unsigned cpu_device_cluster_##name[3] = {__VA_ARGS__};

// A kernel's storage: its size, how many of them lie side by side, what clears the padding of one, and its red zones.
#define CPU_DEVICE_STORAGE(name, storage, count, clear, ...)                                            \
  extern "C" const unsigned long long cpu_device_storage_##name[2] = {sizeof(storage), count};          \
  extern "C" const unsigned long long cpu_device_red_zones_##name[][2] = {__VA_ARGS__};                 \
  extern "C" const unsigned cpu_device_num_red_zones_##name = sizeof(cpu_device_red_zones_##name) / 16; \
  extern "C" void cpu_device_clear_padding_##name(void* bytes) {                                        \
    storage& shared = *static_cast<storage*>(bytes);                                                    \
    clear                                                                                               \
  }

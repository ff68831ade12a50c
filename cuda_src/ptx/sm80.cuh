// Instructions of compute capability 8.0 (7.5 where it says sm_75), one function each, after the PTX ISA: ldmatrix,
// cp.async, mma.sync, conversions and barriers. ptx/sm90.cuh adds Hopper's. Every kernel with tensor cores reaches the
// hardware through these functions, so that tests can put an emulation on the CPU in their place.
#ifndef CUFLASH_CPU_DEVICE

namespace ptx {

template <class T>
constexpr bool is_bfloat16 = false;
template <>
constexpr bool is_bfloat16<__nv_bfloat16> = true;

// shared_address() is the address that instructions on shared memory take.
DEVICE unsigned shared_address(const void* pointer) { return static_cast<unsigned>(__cvta_generic_to_shared(pointer)); }

// ---- Fragments from and to shared memory

// ldmatrix_x4() reads four 8 x 8 matrices of 16-bit elements: lane 8 m + r gives the address of row r of matrix m, and
// lane l gets in d[m] elements 2 (l % 4) and + 1 of row l / 4; transposed, those of column l / 4. sm_75.
DEVICE void ldmatrix_x4(unsigned (&d)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}
DEVICE void ldmatrix_x4_trans(unsigned (&d)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

// movmatrix_trans() transposes an 8 x 8 matrix of 16-bit elements: lane l has elements 2 (l % 4) and + 1 of row l / 4,
// and gets those of column l / 4. sm_75.
DEVICE unsigned movmatrix_trans(unsigned a) {
  unsigned d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// ---- Asynchronous copies from global to shared memory

// cp_async_16() (_8, _4) copies `bytes` <= 16 (8, 4) bytes and writes zeros behind them; with bytes = 0 nothing is
// read. WHOLE_LINES: the L2 cache takes all 128 bytes of their line from memory, because other threads will read them.
template <bool WHOLE_LINES = false>
DEVICE void cp_async_16(unsigned shared, const void* global, int bytes) {
  if constexpr (WHOLE_LINES) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
  }
}
DEVICE void cp_async_8(unsigned shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
DEVICE void cp_async_4(unsigned shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// cp_async_wait_group() waits until at most PENDING of this thread's groups are unfinished.
template <int PENDING>
DEVICE void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- Matrix products of a warp: d += a b, a is 16 x k by rows, b is k x 8 by columns.
// Let g = lane / 4 and t = lane % 4. d[0], d[1] are row g, columns 2 t and 2 t + 1; d[2], d[3] are those of row g + 8.

// mma_m16n8k16() multiplies 16-bit elements, two in a register. a[0] is row g, columns 2 t and + 1; a[1] is row g + 8;
// a[2] and a[3] are the same at columns + 8. b[0] is rows 2 t and + 1 of column g; b[1] is rows + 8.
template <class T>
DEVICE void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  if constexpr (is_bfloat16<T>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// mma_m16n8k8_f16() is the half of it in k, for float16 only: it takes a[0], a[1] and b[0] of the above. sm_75.
DEVICE void mma_m16n8k8_f16(float (&d)[4], const unsigned (&a)[2], unsigned b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(b));
}
// mma_m16n8k32_e4m3() multiplies e4m3 codes, four in a register. a[0] is row g, columns 4 t to 4 t + 3; a[1] is row
// g + 8; a[2] and a[3] are the same at columns + 16. b[0] is rows 4 t to 4 t + 3 of column g; b[1] is rows + 16. sm_89.
DEVICE void mma_m16n8k32_e4m3(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// mma_m8n8k4_f64() multiplies float64, 8 x 4 times 4 x 8: a is row g, column t; b is row t of column g; d is row g,
// columns 2 t and 2 t + 1.
DEVICE void mma_m8n8k4_f64(double (&d)[2], double a, double b) {
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
               : "+d"(d[0]), "+d"(d[1])
               : "d"(a), "d"(b));
}
// mma_m16n8k8_f64() multiplies 16 x 8 times 8 x 8: a[0] and a[1] are rows g and g + 8, column t; a[2] and a[3] the same
// at column t + 4; b[0] is row t of column g, b[1] row t + 4; d is as above. sm_90.
DEVICE void mma_m16n8k8_f64(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
}

// ---- Numbers

// multiply() is a * b with subnormal factors and results, which the option -ftz takes from the operator.
DEVICE float multiply(float a, float b) {
  float y;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// multiply_below() lets the low half of `word` decide on x and the high half on y: where it is below that half of
// `limits` (both halves are the same), the number is multiplied by `factor` (NaN stays). That is issued in less time
// than a selection.
DEVICE void multiply_below(float& x, float& y, unsigned word, unsigned limits, float factor) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("{.reg .pred p, q; .reg .b16 a, b, c, d; .reg .b32 m;"  // one instruction gives the maximum and both predicates
      "max.u16x2 m, %2, %3; mov.b32 {a, b}, m; mov.b32 {c, d}, %2; setp.eq.b16 p, a, c; setp.eq.b16 q, b, d;"
      "@!p mul.ftz.f32 %0, %0, %4; @!q mul.ftz.f32 %1, %1, %4;}"
      : "+f"(x), "+f"(y)
      : "r"(word), "r"(limits), "f"(factor));
#else
  asm("{.reg .pred p, q; setp.lo.u32 p, %2, %4; setp.lo.u32 q, %3, %4;"
      "@p mul.ftz.f32 %0, %0, %5; @q mul.ftz.f32 %1, %1, %5;}"
      : "+f"(x), "+f"(y)
      : "r"(word << 16), "r"(word & 0xffff0000u), "r"(limits << 16), "f"(factor));
#endif
}

// packed_positive() puts two numbers in 16 bits each into a word, the first below; negative ones become 0. sm_80.
template <class T>
DEVICE unsigned packed_positive(float low, float high) {
  unsigned y;
  if constexpr (is_bfloat16<T>)
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  else
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// halves_of_e4m3() makes the four e4m3 codes of a word two words of float16, exactly; NaN stays NaN. sm_89 has an
// instruction for it. Elsewhere a code's exponent and mantissa move into those of a float16, whose exponent's bias is
// larger by 8. Adding a unit in the last place carries of all codes that of NaN alone, and the carry makes the exponent
// that of NaN.
DEVICE void halves_of_e4m3(unsigned (&halves)[2], unsigned codes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2;"
      "cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}"
      : "=r"(halves[0]), "=r"(halves[1])
      : "r"(codes));
#else
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const unsigned pair = __byte_perm(codes, 0, i == 0 ? 0x1404 : 0x3424);  // each code above eight bits of 0
    const unsigned size = pair >> 1 & 0x3f803f80u;
    const unsigned bits = size | ((size + 0x00800080u) & 0x40004000u) | (pair & 0x80008000u);
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(halves[i]) : "r"(bits), "r"(0x5c005c00u));  // times 2^8
  }
#endif
}
// e4m3_of() rounds four numbers to e4m3 codes, to nearest even; what is beyond 448 becomes 448. The first is the lowest
// byte. sm_89.
DEVICE unsigned e4m3_of(float x0, float x1, float x2, float x3) {
  unsigned y;
  asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;"
      "mov.b32 %0, {low, high};}"
      : "=r"(y)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return y;
}

// ex2() is 2^x, flushing subnormals, with a relative error of 2^-22; 2^-inf is 0.
DEVICE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// lg2() is log2 x, with an absolute error of 2^-22 around 1, else a relative one of 2^-22.
DEVICE float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// tanh() is tanh x, with a relative error of 2^-11. sm_75.
DEVICE float tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- Order among threads

// barrier_sync() waits at named barrier `id` (1..15; 0 is __syncthreads) for `threads` threads, a multiple of 32;
// barrier_arrive() only counts.
DEVICE void barrier_sync(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void barrier_arrive(int id, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// load_acquire() and add_release() pass data between thread blocks through a counter in global memory.
DEVICE int load_acquire(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
// load_volatile() looks at such a counter anew, where no data follow it: an acquire would empty L1.
DEVICE int load_volatile(const int* address) { return *static_cast<const volatile int*>(address); }
DEVICE void add_release(int* address, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

}  // namespace ptx

#endif

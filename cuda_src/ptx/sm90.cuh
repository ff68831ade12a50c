// Instructions of compute capability 9.0a (Hopper), one function each, after the PTX ISA: mbarriers, TMA, clusters,
// wgmma and setmaxnreg. ptx/sm80.cuh has those that Ampere has too. Everything in sm90/ reaches the hardware through
// these functions, so that tests can put an emulation on the CPU in their place.
#include "sm80.cuh"

namespace ptx {

// TensorMap is the descriptor of a tensor for TMA, which the host encodes (cuTensorMapEncodeTiled).
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// wgmma_descriptor() describes a matrix in shared memory in rows of 128 bytes with the 128-byte swizzle, in atoms of 8
// rows (1024 bytes, so aligned). Where K is contiguous, `leading` is unused and `stride` is the bytes from 8 rows to
// the next; a step of 16 in k adds 32 bytes. Where M or N is (the transposing products), `leading` is the bytes from 64
// columns to the next, and `stride` those from 8 rows of k to the next.
DEVICE unsigned long long wgmma_descriptor(unsigned address, unsigned leading, unsigned stride) {
  return static_cast<unsigned long long>((address & 0x3ffff) >> 4) |
         static_cast<unsigned long long>(leading >> 4) << 16 | static_cast<unsigned long long>(stride >> 4) << 32 |
         1ull << 62;
}
// wgmma_atoms_descriptor() describes a matrix without a swizzle, K contiguous, in atoms of 8 rows of 16 bytes:
// `leading` is the bytes from 8 of k to the next 8, `stride` those from 8 rows to the next.
DEVICE unsigned long long wgmma_atoms_descriptor(unsigned address, unsigned leading, unsigned stride) {
  return wgmma_descriptor(address, leading, stride) & ~(1ull << 62);
}

}  // namespace ptx

#ifndef CUFLASH_CPU_DEVICE

namespace ptx {

// ---- Barriers in shared memory. A phase ends when its arrivals and the bytes announced for it have all come.

// mbarrier_init() makes `mbarrier` (8 aligned bytes) a barrier of `arrivals` arrivals a phase; the running phase has
// parity 0.
DEVICE void mbarrier_init(unsigned mbarrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(arrivals) : "memory");
}
// fence_mbarrier_init() makes initialised barriers visible to the cluster and to TMA; a block or cluster barrier
// follows.
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbarrier_arrive(unsigned mbarrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}
// mbarrier_arrive_expect() announces bytes that belong to this phase, and arrives.
DEVICE void mbarrier_arrive_expect(unsigned mbarrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(bytes) : "memory");
}
// cp_async_mbarrier_arrive() gives the barrier an arrival when this thread's earlier cp.async have landed.
DEVICE void cp_async_mbarrier_arrive(unsigned mbarrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(mbarrier) : "memory");
}
// mbarrier_try_wait() tells whether the phase of this parity has ended; it may wait a while before it says no.
DEVICE bool mbarrier_try_wait(unsigned mbarrier, unsigned parity) {
  unsigned done;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done)
               : "r"(mbarrier), "r"(parity)
               : "memory");
  return done;
}

// fence_async_shared() makes this thread's ordinary accesses to shared memory visible to TMA and wgmma that come after
// a barrier.
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Programmatic dependent launch: a kernel begins before the one before it has ended. On older GPUs, where it does
// not, these do nothing.

// wait_for_kernel_before() waits until all that the kernel before wrote is visible.
DEVICE void wait_for_kernel_before() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// let_next_kernel_begin() lets the next kernel begin once all thread blocks have called it.
DEVICE void let_next_kernel_begin() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- TMA: tiles of a tensor of 4 dimensions; the innermost coordinate comes first. One thread issues.

// tma_load() copies the box at the coordinates into shared memory; elements out of bounds become zeros and count as
// bytes. tma_store() copies it out of shared memory; elements out of bounds are dropped.
DEVICE void tma_load(unsigned shared, const TensorMap* map, unsigned mbarrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], [%2];" ::"r"(shared),
      "l"(map), "r"(mbarrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
// tma_load_multicast() copies the box to each thread block of the cluster whose bit is set in `blocks`.
DEVICE void tma_load_multicast(unsigned shared, const TensorMap* map, unsigned mbarrier, unsigned short blocks, int c0,
                               int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(map), "r"(mbarrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(blocks)
      : "memory");
}
DEVICE void tma_store(const TensorMap* map, unsigned shared, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// The bulk functions copy flat memory: addresses and sizes are multiples of 16 bytes.
DEVICE void bulk_load(unsigned shared, const void* global, unsigned bytes, unsigned mbarrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(mbarrier)
               : "memory");
}
DEVICE void bulk_store(void* global, unsigned shared, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}
DEVICE void bulk_reduce_add_f32(float* global, unsigned shared, unsigned bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}
// bulk_commit_group() makes a group of this thread's stores and reductions since the last commit.
// bulk_wait_group_read() waits until the sources of all but PENDING groups are read, bulk_wait_group() until they are
// written.
DEVICE void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}
template <int PENDING>
DEVICE void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// add_f32_x4() adds to 16 aligned bytes, each float atomically.
DEVICE void add_f32_x4(float* global, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

// ---- Clusters of thread blocks: an address in another block's shared memory comes from cluster_address().

DEVICE void mbarrier_arrive_cluster(unsigned cluster_address) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address) : "memory");
}
// bulk_copy_cluster() copies to shared memory of another block, and completes bytes of a barrier there.
DEVICE void bulk_copy_cluster(unsigned cluster_shared, unsigned shared, unsigned bytes, unsigned cluster_mbarrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   cluster_shared),
               "r"(shared), "r"(bytes), "r"(cluster_mbarrier)
               : "memory");
}
DEVICE unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
DEVICE unsigned cluster_address(unsigned shared, unsigned rank) {
  unsigned address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}
// store_cluster_x4() stores 16 aligned bytes into shared memory of a block of the cluster.
DEVICE void store_cluster_x4(unsigned cluster_address, float a, float b, float c, float d) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(cluster_address), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// ---- Fragments to shared memory: the inverse of ldmatrix

DEVICE void stmatrix_x4(unsigned address, unsigned a0, unsigned a1, unsigned a2, unsigned a3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a0), "r"(a1),
               "r"(a2), "r"(a3)
               : "memory");
}
DEVICE void stmatrix_x4_trans(unsigned address, unsigned a0, unsigned a1, unsigned a2, unsigned a3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a0),
               "r"(a1), "r"(a2), "r"(a3)
               : "memory");
}

// ---- setmaxnreg: the registers that a thread of this warpgroup may use from now on, a multiple of 8 in 24..240.

template <int REGISTERS>
DEVICE void set_registers_fewer() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
DEVICE void set_registers_more() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- Matrix products of a warpgroup: d = (accumulate ? d : 0) + a b, a 64 x 16, b 16 x N, 16-bit elements.
// They are asynchronous: d, the registers of a and the shared memory of both stay untouched from the wgmma to the wait.

// wgmma_fence() orders earlier accesses to d and to the registers of a before the wgmma that follow.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// keep() keeps the compiler from moving accesses to a register across this point.
DEVICE void keep(float& x) { asm volatile("" : "+f"(x)::"memory"); }
DEVICE void keep(unsigned& x) { asm volatile("" : "+r"(x)::"memory"); }
// forget() makes the compiler forget what it knows of x, so that whatever follows from x is computed again.
DEVICE void forget(unsigned& x) { asm volatile("" : "+r"(x)); }
DEVICE void forget(float& x) { asm volatile("" : "+f"(x)); }

// wgmma_ss() takes a and b by descriptors; TRANS_A and TRANS_B are 1 where M (N) is contiguous in memory instead of K.
// wgmma_rs() takes a in registers: warp w has rows 16 w to 16 w + 15, laid out as for mma_m16n8k16. `d` has N / 2
// registers, and their number picks N; d[4 i .. 4 i + 3] are columns 8 i to 8 i + 7, laid out likewise.
#define CUFLASH_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CUFLASH_NAMES_16 CUFLASH_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define CUFLASH_NAMES_24 CUFLASH_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define CUFLASH_NAMES_32 CUFLASH_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define CUFLASH_NAMES_40 CUFLASH_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define CUFLASH_NAMES_48 CUFLASH_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define CUFLASH_NAMES_56 CUFLASH_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define CUFLASH_NAMES_64 CUFLASH_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define CUFLASH_NAMES_72 CUFLASH_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define CUFLASH_NAMES_80 CUFLASH_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define CUFLASH_NAMES_88 CUFLASH_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define CUFLASH_NAMES_96 CUFLASH_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define CUFLASH_NAMES_104 CUFLASH_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define CUFLASH_NAMES_112 CUFLASH_NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define CUFLASH_NAMES_120 CUFLASH_NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define CUFLASH_NAMES_128 CUFLASH_NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define CUFLASH_D8(i)                                                                                         \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define CUFLASH_D_8 CUFLASH_D8(0)
#define CUFLASH_D_16 CUFLASH_D_8, CUFLASH_D8(8)
#define CUFLASH_D_24 CUFLASH_D_16, CUFLASH_D8(16)
#define CUFLASH_D_32 CUFLASH_D_24, CUFLASH_D8(24)
#define CUFLASH_D_40 CUFLASH_D_32, CUFLASH_D8(32)
#define CUFLASH_D_48 CUFLASH_D_40, CUFLASH_D8(40)
#define CUFLASH_D_56 CUFLASH_D_48, CUFLASH_D8(48)
#define CUFLASH_D_64 CUFLASH_D_56, CUFLASH_D8(56)
#define CUFLASH_D_72 CUFLASH_D_64, CUFLASH_D8(64)
#define CUFLASH_D_80 CUFLASH_D_72, CUFLASH_D8(72)
#define CUFLASH_D_88 CUFLASH_D_80, CUFLASH_D8(80)
#define CUFLASH_D_96 CUFLASH_D_88, CUFLASH_D8(88)
#define CUFLASH_D_104 CUFLASH_D_96, CUFLASH_D8(96)
#define CUFLASH_D_112 CUFLASH_D_104, CUFLASH_D8(104)
#define CUFLASH_D_120 CUFLASH_D_112, CUFLASH_D8(112)
#define CUFLASH_D_128 CUFLASH_D_120, CUFLASH_D8(120)
// P0 to P6 are the operands behind the R registers of d. wgmma_e4m3_ss() and wgmma_e4m3_rs() multiply e4m3 codes: a is
// 64 x 32, b is 32 x N, both with K contiguous; in registers a is laid out as for mma_m16n8k32_e4m3. The tensor cores
// keep fewer bits of such a sum than float32 has.
#define CUFLASH_WGMMA_SS(TYPE, N, R, P0, P1, P2, P3, P4)                                                       \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " P2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE \
               "." TYPE " {" CUFLASH_NAMES_##R "}, " P0 ", " P1 ", p, 1, 1, " P3 ", " P4 ";}"                  \
               : CUFLASH_D_##R                                                                                 \
               : "l"(a), "l"(b), "r"(int(accumulate)), "n"(TRANS_A), "n"(TRANS_B))
#define CUFLASH_WGMMA_RS(TYPE, N, R, P0, P1, P2, P3, P4, P5, P6)                                                \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " P5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE  \
               "." TYPE " {" CUFLASH_NAMES_##R "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", p, 1, 1, " P6 ";}" \
               : CUFLASH_D_##R                                                                                  \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(int(accumulate)), "n"(TRANS_B))
#define CUFLASH_WGMMA_E4M3_SS(N, R, P0, P1, P2)                                                \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " P2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N \
               "k32.f32.e4m3.e4m3 {" CUFLASH_NAMES_##R "}, " P0 ", " P1 ", p, 1, 1;}"          \
               : CUFLASH_D_##R                                                                 \
               : "l"(a), "l"(b), "r"(int(accumulate)))
#define CUFLASH_WGMMA_E4M3_RS(N, R, P0, P1, P2, P3, P4, P5)                                                     \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " P5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N                  \
               "k32.f32.e4m3.e4m3 {" CUFLASH_NAMES_##R "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", p, 1, 1;}" \
               : CUFLASH_D_##R                                                                                  \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(int(accumulate)))
#define CUFLASH_WGMMA(N, R, P0, P1, P2, P3, P4, P5, P6)                                                              \
  template <class T, int TRANS_A, int TRANS_B>                                                                       \
  DEVICE void wgmma_ss(float (&d)[R], unsigned long long a, unsigned long long b, bool accumulate) {                 \
    if constexpr (is_bfloat16<T>)                                                                                    \
      CUFLASH_WGMMA_SS("bf16", N, R, P0, P1, P2, P3, P4);                                                            \
    else                                                                                                             \
      CUFLASH_WGMMA_SS("f16", N, R, P0, P1, P2, P3, P4);                                                             \
  }                                                                                                                  \
  template <class T, int TRANS_B>                                                                                    \
  DEVICE void wgmma_rs(float (&d)[R], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned long long b,      \
                       bool accumulate) {                                                                            \
    if constexpr (is_bfloat16<T>)                                                                                    \
      CUFLASH_WGMMA_RS("bf16", N, R, P0, P1, P2, P3, P4, P5, P6);                                                    \
    else                                                                                                             \
      CUFLASH_WGMMA_RS("f16", N, R, P0, P1, P2, P3, P4, P5, P6);                                                     \
  }                                                                                                                  \
  DEVICE void wgmma_e4m3_ss(float (&d)[R], unsigned long long a, unsigned long long b, bool accumulate) {            \
    CUFLASH_WGMMA_E4M3_SS(N, R, P0, P1, P2);                                                                         \
  }                                                                                                                  \
  DEVICE void wgmma_e4m3_rs(float (&d)[R], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned long long b, \
                            bool accumulate) {                                                                       \
    CUFLASH_WGMMA_E4M3_RS(N, R, P0, P1, P2, P3, P4, P5);                                                             \
  }
CUFLASH_WGMMA(16, 8, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
CUFLASH_WGMMA(32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
CUFLASH_WGMMA(48, 24, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
CUFLASH_WGMMA(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
CUFLASH_WGMMA(80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
CUFLASH_WGMMA(96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
CUFLASH_WGMMA(112, 56, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
CUFLASH_WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
CUFLASH_WGMMA(144, 72, "%72", "%73", "%74", "%75", "%76", "%77", "%78")
CUFLASH_WGMMA(160, 80, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
CUFLASH_WGMMA(176, 88, "%88", "%89", "%90", "%91", "%92", "%93", "%94")
CUFLASH_WGMMA(192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
CUFLASH_WGMMA(208, 104, "%104", "%105", "%106", "%107", "%108", "%109", "%110")
CUFLASH_WGMMA(224, 112, "%112", "%113", "%114", "%115", "%116", "%117", "%118")
CUFLASH_WGMMA(240, 120, "%120", "%121", "%122", "%123", "%124", "%125", "%126")
CUFLASH_WGMMA(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

}  // namespace ptx

#endif

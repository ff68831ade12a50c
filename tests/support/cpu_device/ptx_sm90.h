// The functions of cuda_src/sm90/ptx.cuh for the CPU.
#pragma once
#include "ptx_sm80.h"

namespace ptx {

using cpu_device::Reduction;

inline void mbarrier_init(unsigned mbarrier, unsigned arrivals, Where where = {}) {
  cpu_device::mbarrier_init(mbarrier, arrivals, where);
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(unsigned mbarrier, Where where = {}) { cpu_device::mbarrier_arrive(mbarrier, where); }
inline void mbarrier_expect(unsigned mbarrier, unsigned bytes, Where where = {}) {
  cpu_device::mbarrier_expect(mbarrier, bytes, where);
}
inline void mbarrier_arrive_expect(unsigned mbarrier, unsigned bytes, Where where = {}) {
  cpu_device::mbarrier_expect(mbarrier, bytes, where);
  cpu_device::mbarrier_arrive(mbarrier, where);
}
inline void mbarrier_arrive_cluster(unsigned cluster_address, Where where = {}) {
  cpu_device::mbarrier_arrive(cluster_address, where);
}
inline bool mbarrier_try_wait(unsigned mbarrier, unsigned parity, Where where = {}) {
  return cpu_device::mbarrier_wait(mbarrier, parity, where);
}
inline bool mbarrier_try_wait_cluster(unsigned mbarrier, unsigned parity, Where where = {}) {
  return cpu_device::mbarrier_wait(mbarrier, parity, where);
}
inline void cp_async_mbarrier_arrive(unsigned mbarrier, Where where = {}) {
  cpu_device::copy_async_arrive(mbarrier, where);
}

inline void fence_async_shared() { cpu_device::fence_async_shared(); }

// Kernels run one after the other.
inline void wait_for_kernel_before() {}
inline void let_next_kernel_begin() {}

inline void tma_prefetch_map(const void*) {}
inline void tma_load(unsigned shared, const void* map, unsigned mbarrier, int c0, int c1, int c2, Where where = {}) {
  const int at[] = {c0, c1, c2};
  cpu_device::tensor_load(shared, map, mbarrier, at, 3, where);
}
inline void tma_load_multicast(unsigned shared, const void* map, unsigned mbarrier, unsigned short ctas, int c0, int c1,
                               int c2, Where where = {}) {
  const int at[] = {c0, c1, c2};
  cpu_device::tensor_load_multicast(shared, map, mbarrier, ctas, at, 3, where);
}
inline void tma_store(const void* map, unsigned shared, int c0, int c1, int c2, Where where = {}) {
  const int at[] = {c0, c1, c2};
  cpu_device::tensor_store(map, shared, at, 3, Reduction::kNone, where);
}
inline void tma_reduce_add(const void* map, unsigned shared, int c0, int c1, int c2, Where where = {}) {
  const int at[] = {c0, c1, c2};
  cpu_device::tensor_store(map, shared, at, 3, Reduction::kAddFloat, where);
}
inline void tma_load(unsigned shared, const void* map, unsigned mbarrier, int c0, int c1, int c2, int c3,
                     Where where = {}) {
  const int at[] = {c0, c1, c2, c3};
  cpu_device::tensor_load(shared, map, mbarrier, at, 4, where);
}
inline void tma_load_multicast(unsigned shared, const void* map, unsigned mbarrier, unsigned short ctas, int c0, int c1,
                               int c2, int c3, Where where = {}) {
  const int at[] = {c0, c1, c2, c3};
  cpu_device::tensor_load_multicast(shared, map, mbarrier, ctas, at, 4, where);
}
inline void tma_store(const void* map, unsigned shared, int c0, int c1, int c2, int c3, Where where = {}) {
  const int at[] = {c0, c1, c2, c3};
  cpu_device::tensor_store(map, shared, at, 4, Reduction::kNone, where);
}
inline void tma_reduce_add(const void* map, unsigned shared, int c0, int c1, int c2, int c3, Where where = {}) {
  const int at[] = {c0, c1, c2, c3};
  cpu_device::tensor_store(map, shared, at, 4, Reduction::kAddFloat, where);
}
inline void tma_load(unsigned shared, const void* map, unsigned mbarrier, int c0, int c1, int c2, int c3, int c4,
                     Where where = {}) {
  const int at[] = {c0, c1, c2, c3, c4};
  cpu_device::tensor_load(shared, map, mbarrier, at, 5, where);
}
inline void tma_load_multicast(unsigned shared, const void* map, unsigned mbarrier, unsigned short ctas, int c0, int c1,
                               int c2, int c3, int c4, Where where = {}) {
  const int at[] = {c0, c1, c2, c3, c4};
  cpu_device::tensor_load_multicast(shared, map, mbarrier, ctas, at, 5, where);
}
inline void tma_store(const void* map, unsigned shared, int c0, int c1, int c2, int c3, int c4, Where where = {}) {
  const int at[] = {c0, c1, c2, c3, c4};
  cpu_device::tensor_store(map, shared, at, 5, Reduction::kNone, where);
}
inline void tma_reduce_add(const void* map, unsigned shared, int c0, int c1, int c2, int c3, int c4, Where where = {}) {
  const int at[] = {c0, c1, c2, c3, c4};
  cpu_device::tensor_store(map, shared, at, 5, Reduction::kAddFloat, where);
}

inline void bulk_load(unsigned shared, const void* global, unsigned bytes, unsigned mbarrier, Where where = {}) {
  cpu_device::bulk_load(shared, global, bytes, mbarrier, where);
}
inline void bulk_store(void* global, unsigned shared, unsigned bytes, Where where = {}) {
  cpu_device::bulk_store(global, shared, bytes, Reduction::kNone, where);
}
inline void bulk_reduce_add_f32(float* global, unsigned shared, unsigned bytes, Where where = {}) {
  cpu_device::bulk_store(global, shared, bytes, Reduction::kAddFloat, where);
}
inline void bulk_copy_cluster(unsigned cluster_shared, unsigned shared, unsigned bytes, unsigned cluster_mbarrier,
                              Where where = {}) {
  cpu_device::bulk_copy_cluster(cluster_shared, shared, bytes, cluster_mbarrier, where);
}
inline void store_cluster_x4(unsigned cluster_address, float a, float b, float c, float d, Where where = {}) {
  const float x[] = {a, b, c, d};
  cpu_device::store_shared(cluster_address, x, sizeof x, where);
}
inline void bulk_commit_group() { cpu_device::bulk_commit(); }
template <int PENDING>
void bulk_wait_group() {
  cpu_device::bulk_wait(PENDING, false);
}
template <int PENDING>
void bulk_wait_group_read() {
  cpu_device::bulk_wait(PENDING, true);
}

inline void stmatrix_x4(unsigned address, unsigned a0, unsigned a1, unsigned a2, unsigned a3, Where where = {}) {
  const unsigned a[] = {a0, a1, a2, a3};
  cpu_device::store_matrices(address, a, 4, false, where);
}
inline void stmatrix_x4_trans(unsigned address, unsigned a0, unsigned a1, unsigned a2, unsigned a3, Where where = {}) {
  const unsigned a[] = {a0, a1, a2, a3};
  cpu_device::store_matrices(address, a, 4, true, where);
}
inline void stmatrix_x2(unsigned address, unsigned a0, unsigned a1, Where where = {}) {
  const unsigned a[] = {a0, a1};
  cpu_device::store_matrices(address, a, 2, false, where);
}
inline void stmatrix_x2_trans(unsigned address, unsigned a0, unsigned a1, Where where = {}) {
  const unsigned a[] = {a0, a1};
  cpu_device::store_matrices(address, a, 2, true, where);
}

inline unsigned cluster_rank() { return cpu_device::cluster_rank(); }
inline unsigned cluster_address(unsigned shared, unsigned rank, Where where = {}) {
  return cpu_device::cluster_address(shared, rank, where);
}
inline void cluster_arrive(Where where = {}) { cpu_device::cluster_arrive(where); }
inline void cluster_wait(Where where = {}) { cpu_device::cluster_wait(where); }

template <int REGISTERS>
void set_registers_fewer(Where where = {}) {
  static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "a count that setmaxnreg takes");
  cpu_device::warp_collective(~0u, [](void* const*, unsigned) {}, nullptr, "setmaxnreg", where);
}
template <int REGISTERS>
void set_registers_more(Where where = {}) {
  set_registers_fewer<REGISTERS>(where);
}
inline void grid_dependency_wait() {}
inline void grid_dependents_launch() {}

inline void wgmma_fence(Where where = {}) { cpu_device::wgmma_fence(where); }
inline void wgmma_commit_group(Where where = {}) { cpu_device::wgmma_commit(where); }
template <int PENDING>
void wgmma_wait_group(Where where = {}) {
  cpu_device::wgmma_wait(PENDING, where);
}
inline void keep(float&) {}
inline void forget(unsigned&) {}
inline void forget(float&) {}
inline void keep(unsigned&) {}
template <class T, int TRANS_A, int TRANS_B, int R>
void wgmma_ss(float (&d)[R], unsigned long long a, unsigned long long b, bool accumulate, Where where = {}) {
  static_assert(R % 8 == 0 && R <= 128, "columns come in steps of 16, up to 256");
  cpu_device::wgmma({d, 2 * R, nullptr, a, b, accumulate, TRANS_A, TRANS_B, format<T>, where});
}
template <class T, int TRANS_B, int R>
void wgmma_rs(float (&d)[R], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned long long b, bool accumulate,
              Where where = {}) {
  static_assert(R % 8 == 0 && R <= 128, "columns come in steps of 16, up to 256");
  const unsigned a[] = {a0, a1, a2, a3};
  cpu_device::wgmma({d, 2 * R, a, 0, b, accumulate, false, TRANS_B, format<T>, where});
}
template <int R>
void wgmma_e4m3_ss(float (&d)[R], unsigned long long a, unsigned long long b, bool accumulate, Where where = {}) {
  static_assert(R % 8 == 0 && R <= 128, "columns come in steps of 16, up to 256");
  cpu_device::wgmma({d, 2 * R, nullptr, a, b, accumulate, false, false, cpu_device::Format::kE4m3, where});
}
template <int R>
void wgmma_e4m3_rs(float (&d)[R], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned long long b,
                   bool accumulate, Where where = {}) {
  static_assert(R % 8 == 0 && R <= 128, "columns come in steps of 16, up to 256");
  const unsigned a[] = {a0, a1, a2, a3};
  cpu_device::wgmma({d, 2 * R, a, 0, b, accumulate, false, false, cpu_device::Format::kE4m3, where});
}

}  // namespace ptx

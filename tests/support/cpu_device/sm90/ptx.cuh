// No kernel uses these instructions, which add to those of cuda_src/ptx/sm90.cuh; the CPU device has twins of them.
#pragma once

#ifndef CUFLASH_CPU_DEVICE

namespace ptx {

// mbarrier_expect() announces bytes without arriving.
DEVICE void mbarrier_expect(unsigned mbarrier, unsigned bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(bytes) : "memory");
}
// mbarrier_try_wait_cluster() also acquires what other blocks of the cluster released by arriving.
DEVICE bool mbarrier_try_wait_cluster(unsigned mbarrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
      : "=r"(done)
      : "r"(mbarrier), "r"(parity)
      : "memory");
  return done;
}
DEVICE void tma_prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// tma_load() takes tiles of tensors of 3 and 5 dimensions, too. tma_load_multicast() loads into each block of the
// cluster whose bit is set in `ctas`, at the same offset, each with its own mbarrier. tma_reduce_add() sums in float32.
DEVICE void tma_load(unsigned shared, const TensorMap* map, unsigned mbarrier, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared),
      "l"(map), "r"(mbarrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
DEVICE void tma_load_multicast(unsigned shared, const TensorMap* map, unsigned mbarrier, unsigned short ctas, int c0,
                               int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%4, %5, %6}], [%2], %3;" ::"r"(shared),
      "l"(map), "r"(mbarrier), "h"(ctas), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
DEVICE void tma_store(const TensorMap* map, unsigned shared, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(shared), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}
DEVICE void tma_reduce_add(const TensorMap* map, unsigned shared, int c0, int c1, int c2) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(shared), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
DEVICE void tma_reduce_add(const TensorMap* map, unsigned shared, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
DEVICE void tma_load(unsigned shared, const TensorMap* map, unsigned mbarrier, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, "
      "%7}], [%2];" ::"r"(shared),
      "l"(map), "r"(mbarrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
DEVICE void tma_load_multicast(unsigned shared, const TensorMap* map, unsigned mbarrier, unsigned short ctas, int c0,
                               int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(shared),
      "l"(map), "r"(mbarrier), "h"(ctas), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
DEVICE void tma_store(const TensorMap* map, unsigned shared, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
      "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
DEVICE void tma_reduce_add(const TensorMap* map, unsigned shared, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(
          map),
      "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
// stmatrix_x2() and stmatrix_x2_trans() store two matrices where the kernels' stmatrix stores four.
DEVICE void stmatrix_x2(unsigned address, unsigned a0, unsigned a1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a0), "r"(a1) : "memory");
}
DEVICE void stmatrix_x2_trans(unsigned address, unsigned a0, unsigned a1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a0), "r"(a1)
               : "memory");
}
// grid_dependency_wait() waits for the grid before this one, and grid_dependents_launch() lets the grid after this one
// start (programmatic dependent launch).
DEVICE void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void grid_dependents_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace ptx

#endif

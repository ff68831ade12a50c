// No kernel uses these instructions, which add to those of cuda_src/ptx/sm80.cuh; the CPU device has twins of them.
#pragma once

#ifndef CUFLASH_CPU_DEVICE

namespace ptx {

DEVICE void ldmatrix_x2(unsigned (&d)[2], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(d[0]), "=r"(d[1])
               : "r"(address)
               : "memory");
}
DEVICE void ldmatrix_x2_trans(unsigned (&d)[2], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(d[0]), "=r"(d[1])
               : "r"(address)
               : "memory");
}

}  // namespace ptx

#endif

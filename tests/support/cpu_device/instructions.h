// The twins of PTX instructions that need the runtime. ptx_sm80.h and ptx_sm90.h give them the kernels' names.
#pragma once
#include "runtime.h"

namespace cpu_device {

enum class Format { kFloat16, kBfloat16, kE4m3 };

// fragments.cpp: ldmatrix, stmatrix (count matrices of 8x8 16-bit elements), movmatrix, mma.sync
void load_matrices(unsigned* d, int count, bool transposed, uint32_t address, Where where);
void store_matrices(uint32_t address, const unsigned* a, int count, bool transposed, Where where);
unsigned transpose_matrix(unsigned a, Where where);
// d (16 x 8) += a (16 x depth) b (depth x 8); a register has two elements of 16 bits or four e4m3 codes.
void multiply_fragments(float* d, const unsigned* a, const unsigned* b, int depth, Format format, Where where);
void multiply_fragments(double* d, double a, double b, Where where);  // m8n8k4

// copies.cpp: cp.async and bulk copies
void copy_async(uint32_t shared, const void* global, int size, int bytes, Where where);
void copy_async_commit();
void copy_async_wait(int pending);
void copy_async_arrive(uint32_t mbarrier, Where where);
enum class Reduction { kNone, kAddFloat };
void bulk_load(uint32_t shared, const void* global, unsigned bytes, uint32_t mbarrier, Where where);
void bulk_store(void* global, uint32_t shared, unsigned bytes, Reduction reduction, Where where);
void bulk_copy_cluster(uint32_t to, uint32_t from, unsigned bytes, uint32_t mbarrier, Where where);
void bulk_commit();
void bulk_wait(int pending, bool read_only);

// tensor_map.cpp: TMA
void tensor_load(uint32_t shared, const void* map, uint32_t mbarrier, const int* coordinates, int rank, Where where);
void tensor_load_multicast(uint32_t shared, const void* map, uint32_t mbarrier, unsigned ctas, const int* coordinates,
                           int rank, Where where);
void tensor_store(const void* map, uint32_t shared, const int* coordinates, int rank, Reduction reduction, Where where);

// shared.cpp: an ordinary store to shared memory of any block of the cluster
void store_shared(uint32_t address, const void* from, unsigned bytes, Where where);

// mbarrier.cpp
void mbarrier_init(uint32_t address, unsigned arrivals, Where where);
void mbarrier_arrive(uint32_t address, Where where);
void mbarrier_expect(uint32_t address, unsigned bytes, Where where);
bool mbarrier_wait(uint32_t address, unsigned parity, Where where);

// wgmma.cpp
void wgmma_fence(Where where);
void wgmma_commit(Where where);
void wgmma_wait(int pending, Where where);
// d (64 x columns) = (accumulate ? d : 0) + a (64 x depth) b (depth x columns); a from registers where they are given.
// The depth is 32 bytes: 16 elements of 16 bits or 32 e4m3 codes.
struct Wgmma {
  float* d;
  int columns;
  const unsigned* a_registers;
  uint64_t a, b;
  bool accumulate, transposed_a, transposed_b;
  Format format;
  Where where;
};
void wgmma(const Wgmma& product);

void fence_async_shared();
unsigned cluster_rank();

float e4m3_to_float(uint8_t code);
uint8_t float_to_e4m3(float x);  // to nearest even, saturated

}  // namespace cpu_device

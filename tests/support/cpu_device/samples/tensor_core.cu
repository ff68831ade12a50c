// This sample computes out = a b^T for a of 16 x 128 and b of 32 x 128 in bfloat16 by one warp: chunks of 32 columns
// come by cp.async into two buffers, fragments by ldmatrix, products by mma.sync.
constexpr int M = 16, N = 32, K = 128, CHUNK = 32;

struct alignas(16) Chunk {
  __nv_bfloat16 a[M][CHUNK], b[N][CHUNK];
};
struct SharedStorage {
  Chunk first;
  Chunk second;
};

__device__ void fetch(Chunk& chunk, const __nv_bfloat16* a, const __nv_bfloat16* b, int k) {
  const int row = threadIdx.x / 4, column = threadIdx.x % 4 * 8;
  for (int r = row; r < M; r += 8)
    ptx::cp_async_16(ptx::shared_address(&chunk.a[r][column]), a + r * K + k + column, 16);
  for (int r = row; r < N; r += 8)
    ptx::cp_async_16(ptx::shared_address(&chunk.b[r][column]), b + r * K + k + column, 16);
  ptx::cp_async_commit_group();
}

extern "C" __global__ void multiply(const __nv_bfloat16* a, const __nv_bfloat16* b, float* out) {
  extern __shared__ __align__(16) unsigned char bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(bytes);
  const int lane = threadIdx.x;
  float sums[N / 8][4] = {};
  fetch(shared.first, a, b, 0);
  for (int k = 0; k < K; k += CHUNK) {
    Chunk& chunk = k / CHUNK % 2 ? shared.second : shared.first;
    Chunk& next = k / CHUNK % 2 ? shared.first : shared.second;
    if (k + CHUNK < K) {
      fetch(next, a, b, k + CHUNK);
      ptx::cp_async_wait_group<1>();
    } else {
      ptx::cp_async_wait_group<0>();
    }
    __syncwarp();
    for (int step = 0; step < CHUNK; step += 16) {
      unsigned left[4], right[2];
      ptx::ldmatrix_x4(left, ptx::shared_address(&chunk.a[lane % 16][step + lane / 16 * 8]));
      for (int n = 0; n < N / 8; n++) {
        ptx::ldmatrix_x2(right, ptx::shared_address(&chunk.b[n * 8 + lane % 8][step + lane / 8 % 2 * 8]));
        ptx::mma_m16n8k16<__nv_bfloat16>(sums[n], left, right);
      }
    }
    __syncwarp();
  }
  for (int n = 0; n < N / 8; n++) {
    for (int i = 0; i < 4; i++) {
      out[(lane / 4 + i / 2 * 8) * N + n * 8 + lane % 4 * 2 + i % 2] = sums[n][i];
    }
  }
}

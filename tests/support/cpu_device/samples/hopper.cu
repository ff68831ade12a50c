// This sample computes out = (q k^T) v for tiles of 64 x 64 in bfloat16: a producer warp loads K and V by TMA into two
// stages, and a warpgroup multiplies by wgmma (the weights stay in registers) and stores through shared memory by TMA.
constexpr int SIDE = 64, STAGES = 2, TILE_BYTES = SIDE * SIDE * 2, CONSUMERS = 128;
using Bfloat = __nv_bfloat16;

struct SharedStorage {
  alignas(1024) unsigned char q[TILE_BYTES];
  alignas(1024) unsigned char k[STAGES * TILE_BYTES];
  alignas(1024) unsigned char v[STAGES * TILE_BYTES];
  alignas(1024) unsigned char out[TILE_BYTES];
  unsigned long long q_full, full[STAGES], empty[STAGES];
};

DEVICE void wait(const unsigned long long& barrier, int phase) {
  while (!ptx::mbarrier_try_wait(ptx::shared_address(&barrier), phase & 1)) {
  }
}

DEVICE unsigned packed(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  unsigned word;
  memcpy(&word, &pair, sizeof word);
  return word;
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1)
    multiply(const __grid_constant__ ptx::TensorMap q_map, const __grid_constant__ ptx::TensorMap k_map,
             const __grid_constant__ ptx::TensorMap v_map, const __grid_constant__ ptx::TensorMap out_map, int tiles) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(bytes);
  const unsigned q = ptx::shared_address(shared.q), k = ptx::shared_address(shared.k),
                 v = ptx::shared_address(shared.v), out = ptx::shared_address(shared.out);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(ptx::shared_address(&shared.q_full), 1);
    for (int s = 0; s < STAGES; s++) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[s]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[s]), CONSUMERS);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (threadIdx.x >= CONSUMERS) {
    if (threadIdx.x > CONSUMERS) return;
    ptx::mbarrier_arrive_expect(ptx::shared_address(&shared.q_full), TILE_BYTES);
    ptx::tma_load(q, &q_map, ptx::shared_address(&shared.q_full), 0, 0, 0);
    for (int tile = 0; tile < tiles; tile++) {
      const int stage = tile % STAGES;
      if (tile >= STAGES) wait(shared.empty[stage], tile / STAGES - 1);
      const unsigned full = ptx::shared_address(&shared.full[stage]);
      ptx::mbarrier_arrive_expect(full, 2 * TILE_BYTES);
      ptx::tma_load(k + stage * TILE_BYTES, &k_map, full, 0, tile * SIDE, 0);
      ptx::tma_load(v + stage * TILE_BYTES, &v_map, full, 0, tile * SIDE, 0);
    }
    return;
  }

  float sums[32];
  wait(shared.q_full, 0);
  for (int tile = 0; tile < tiles; tile++) {
    const int stage = tile % STAGES;
    float scores[32];
    wait(shared.full[stage], tile / STAGES);
    ptx::wgmma_fence();
    for (int step = 0; step < 4; step++) {
      ptx::wgmma_ss<Bfloat, 0, 0>(scores, ptx::wgmma_descriptor(q + step * 32, 0, 1024),
                                  ptx::wgmma_descriptor(k + stage * TILE_BYTES + step * 32, 0, 1024), step > 0);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    unsigned weights[16];
    for (int i = 0; i < 16; i++) weights[i] = packed(scores[2 * i], scores[2 * i + 1]);
    ptx::wgmma_fence();
    for (int step = 0; step < 4; step++) {
      ptx::wgmma_rs<Bfloat, 1>(
          sums, weights[4 * step], weights[4 * step + 1], weights[4 * step + 2], weights[4 * step + 3],
          ptx::wgmma_descriptor(v + stage * TILE_BYTES + step * 2048, TILE_BYTES, 1024), tile > 0 || step > 0);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();  // the sums
    ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[stage]));
  }

  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;
  for (int pair = 0; pair < 4; pair++) {
    const int column = pair * 2 + lane / 16;  // in 16 bytes
    const float* d = sums + pair * 8;
    ptx::stmatrix_x4(out + row * 128 + ((column ^ row % 8) * 16), packed(d[0], d[1]), packed(d[2], d[3]),
                     packed(d[4], d[5]), packed(d[6], d[7]));
  }
  ptx::fence_async_shared();
  ptx::barrier_sync(1, CONSUMERS);
  if (threadIdx.x == 0) {
    ptx::tma_store(&out_map, out, 0, 0, 0);
    ptx::bulk_commit_group();
    ptx::bulk_wait_group_read<0>();
  }
}

// This sample sums the columns of 64 x 64 tiles, by way of two shared arrays.
constexpr int N = 64;

struct SharedStorage {
  float tile[N * N];
  float sums[N];
};

extern "C" __global__ void column_sums(const float* in, float* out) {
  extern __shared__ __align__(16) unsigned char bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(bytes);
  const int t = threadIdx.x;
  const float* from = in + blockIdx.x * N * N;
  for (int i = t * 4; i < N * N; i += N * 4)
    *reinterpret_cast<float4*>(shared.tile + i) = *reinterpret_cast<const float4*>(from + i);
  __syncthreads();
  float parts[4] = {};
  for (int row = 0; row < N; row++) parts[row % 4] += shared.tile[row * N + t];
  shared.sums[N - 1 - t] = (parts[0] + parts[1]) + (parts[2] + parts[3]);
  __syncthreads();
  out[blockIdx.x * N + t] = shared.sums[t];
}

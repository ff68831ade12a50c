// The softmax of attention without cuflash.

__device__ int score_column(int n) { return (n * blockDim.x + threadIdx.x) * VECTOR; }

// The baseline's softmax of causal scores in place; the row of query i has seqlen keys, those beyond i are hidden.
extern "C" __global__ void causal_softmax(Element* scores, int seqlen, float scale) {
  const Index row = Index(blockIdx.x) * blockDim.y + threadIdx.y;
  const int query = row % seqlen;
  scores += row * seqlen;
  Vector v[SCORE_VECTORS];
  float maximum = LOWEST, sum = 0;
#pragma unroll
  for (int n = 0; n < SCORE_VECTORS; ++n) {
    const int column = score_column(n);
    if (column > query) continue;
    v[n] = load(scores + column);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      v[n].x[i] = column + i > query ? LOWEST : scale * v[n].x[i];
      maximum = fmaxf(maximum, v[n].x[i]);
    }
  }
  maximum = over_row<Maximum>(maximum);
#pragma unroll
  for (int n = 0; n < SCORE_VECTORS; ++n) {
    if (score_column(n) > query) continue;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sum += v[n].x[i] = __expf(v[n].x[i] - maximum);
  }
  const float inverse = 1.0f / over_row<Sum>(sum);
#pragma unroll
  for (int n = 0; n < SCORE_VECTORS; ++n) {
    const int column = score_column(n);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) v[n].x[i] = column > query ? 0.0f : v[n].x[i] * inverse;
    if (column < seqlen) store(scores + column, v[n]);
  }
}

// Its gradient: scale * weights * (dweights - sum(weights * dweights)), in place of dweights.
extern "C" __global__ void causal_softmax_backward(Element* dweights, const Element* weights, int seqlen, float scale) {
  const Index row = Index(blockIdx.x) * blockDim.y + threadIdx.y;
  const int query = row % seqlen;
  dweights += row * seqlen;
  weights += row * seqlen;
  Vector w[SCORE_VECTORS], d[SCORE_VECTORS];
  float sum = 0;
#pragma unroll
  for (int n = 0; n < SCORE_VECTORS; ++n) {
    const int column = score_column(n);
    if (column > query) continue;
    w[n] = load(weights + column);  // 0 beyond the query
    d[n] = load(dweights + column);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sum += w[n].x[i] * d[n].x[i];
  }
  sum = over_row<Sum>(sum);
#pragma unroll
  for (int n = 0; n < SCORE_VECTORS; ++n) {
    const int column = score_column(n);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) d[n].x[i] = column > query ? 0.0f : scale * w[n].x[i] * (d[n].x[i] - sum);
    if (column < seqlen) store(dweights + column, d[n]);
  }
}

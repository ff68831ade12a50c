// AdamW, and the norm of all gradients.

// Each block's share of the sum of squares, in an order that does not change.
extern "C" __global__ void square_sums(float* partial, const float4* x, Index vectors) {
  float sum = 0;
#pragma unroll 4
  for (Index i = Index(blockIdx.x) * blockDim.x + threadIdx.x; i < vectors; i += Index(gridDim.x) * blockDim.x) {
    const float4 v = x[i];
    sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  sum = over_row<Sum>(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// AdamW (Loshchilov and Hutter, 2019) on all parameters at once; the first `decayed` are matrices. The gradient's norm
// is brought down to at most `clip`; its square comes from the device, so that nobody waits.
extern "C" __global__ void adamw(Element* weights, float4* master, float4* first, float4* second,
                                 const float4* gradient, const float* squared_norm, Index size, Index decayed,
                                 float clip, float rate, float beta1, float beta2, float correction1, float correction2,
                                 float epsilon, float decay) {
  const Index i = Index(blockIdx.x) * blockDim.x + threadIdx.x;  // of four parameters
  if (4 * i >= size) return;
  const float factor = fminf(1.0f, clip * rsqrtf(*squared_norm));
  float4 gs = gradient[i], ms = first[i], vs = second[i], ws = master[i];
  float *g = &gs.x, *m = &ms.x, *v = &vs.x, *w = &ws.x;
  const float kept = 4 * i < decayed ? 1 - rate * decay : 1.0f;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    g[n] *= factor;
    m[n] += (1 - beta1) * (g[n] - m[n]);
    v[n] += (1 - beta2) * (g[n] * g[n] - v[n]);
    w[n] = w[n] * kept - rate * (m[n] * correction1) / (sqrtf(v[n] * correction2) + epsilon);
  }
  first[i] = ms;
  second[i] = vs;
  master[i] = ws;
  __nv_bfloat162* rounded = reinterpret_cast<__nv_bfloat162*>(weights) + 2 * i;
  rounded[0] = __floats2bfloat162_rn(w[0], w[1]);
  rounded[1] = __floats2bfloat162_rn(w[2], w[3]);
}

// This header makes elements of 16 bits of e4m3 codes, which is exact, and rounds numbers to e4m3.
#include "../fragment/fragment.cuh"

constexpr int CODES = 16;  // codes that one access moves

union CodeVector {
  u32 words[4];
  uint4 vector;
};

// codes_of() is an array of codes: its strides count codes as they count elements.
DEVICE const Tensor<const u8>& codes_of(const Tensor<const Element>& x) {
  return reinterpret_cast<const Tensor<const u8>&>(x);
}

DEVICE void* at_shared(u32 address) { return __cvta_shared_to_generic(address); }

// read_codes() reads the first `left` codes of a vector; a code behind them is 0. ALIGNED: `from` is a multiple of the
// vector's size.
template <bool ALIGNED>
DEVICE CodeVector read_codes(const u8* from, int left) {
  CodeVector x = {};
  if (left <= 0) return x;
  if (ALIGNED && left >= CODES) {
    x.vector = *reinterpret_cast<const uint4*>(from);
    return x;
  }
#pragma unroll
  for (int i = 0; i < CODES; i++) x.words[i / 4] |= i < left ? u32(from[i]) << i % 4 * 8 : 0;
  return x;
}

DEVICE u32 element_pair(__half, u32 halves) { return halves; }
DEVICE u32 element_pair(__nv_bfloat16, u32 halves) {
  const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&halves));
  return packed(__nv_bfloat16(), x.x, x.y);
}

// elements_of() makes eight elements of one half of a vector.
DEVICE uint4 elements_of(const CodeVector& codes, int half) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    u32 halves[2];
    ptx::halves_of_e4m3(halves, codes.words[2 * half + i]);
    words[2 * i] = element_pair(Element(), halves[0]);
    words[2 * i + 1] = element_pair(Element(), halves[1]);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// rounded_to_e4m3() rounds a number of at most 448 in size: it is brought to where float32's last place is e4m3's, and
// back.
DEVICE float rounded_to_e4m3(float x) {
  constexpr float LEAST_NORMAL = 0x1p-6f;
  const u32 exponent = __float_as_uint(larger(fabsf(x), LEAST_NORMAL)) & 0x7f800000u;
  const float magic = __uint_as_float(exponent + (20u << 23)) * 1.5f;
  return __fsub_rn(__fadd_rn(x, magic), magic);
}

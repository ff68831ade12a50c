"""One small kernel for each wrapped instruction, to be run with the same data on the CPU test device and on a GPU.

Every kernel takes ``(const unsigned* in, unsigned* out, TensorMap map)``: `in` holds random words, `out` starts as
zeros. The instruction's registers and the memory that it wrote go to `out`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
WORDS_IN = 16384
WORDS_OUT = 32768
SMEM_BYTES = 64 * 1024


@dataclass(frozen=True)
class Map:
    """A tensor map over the words of `in` (a load) or of `out` (a store)."""

    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    of_out: bool = False


@dataclass(frozen=True)
class Case:
    """An instruction's kernel.

    Attributes
    ----------
    name, arch : str
    body : str
        Of the kernel; ``smem`` is dynamic shared memory, ``base`` its address, ``t`` the thread, ``lane`` its lane.
    threads, cluster : int
    data : callable
        From a generator to the WORDS_IN words.
    tolerance : float
        Of float32 results, relative to their largest; 0 compares bits.
    map : Map, optional
    """

    name: str
    arch: str
    body: str
    data: Callable[[np.random.Generator], Array]
    threads: int = 32
    cluster: int = 1
    tolerance: float = 0.0
    map: Map | None = None

    @property
    def entry(self) -> str:
        """Return the kernel's name, which may not be that of a function."""
        return f"try_{self.name}"

    @property
    def kernel(self) -> str:
        """Return the kernel's text, which stands behind ``HELPERS``."""
        cluster = f"__cluster_dims__({self.cluster}, 1, 1)" if self.cluster > 1 else ""
        map_type = "const __grid_constant__ ptx::TensorMap map" if self.arch == "sm_90a" else "int"
        return f"""
extern "C" __global__ void {cluster} {self.entry}(const unsigned* in, unsigned* out, {map_type}) {{
  extern __shared__ __align__(1024) unsigned char smem[];
  const int t = threadIdx.x, lane = t % 32;
  const unsigned base = ptx::shared_address(smem);
  (void)t, (void)lane, (void)base;
  {self.body}
}}
"""


# HELPERS stands between the architecture's ptx.cuh and the kernels.
HELPERS = f"""
using Half = __half;
using Bfloat = __nv_bfloat16;
__device__ __forceinline__ float as_float(unsigned x) {{ return __uint_as_float(x); }}
__device__ __forceinline__ void fill(unsigned char* smem, const unsigned* in, int words) {{
  for (int i = threadIdx.x; i < words; i += blockDim.x) reinterpret_cast<unsigned*>(smem)[i] = in[i % {WORDS_IN}];
  __syncthreads();
}}
"""


def random_words(rng: np.random.Generator) -> Array:
    """Draw any bits."""
    return rng.integers(0, 2**32, WORDS_IN, np.uint32)


def float32_words(rng: np.random.Generator) -> Array:
    """Draw float32 of normal size."""
    return rng.standard_normal(WORDS_IN, np.float32).view(np.uint32)


def float64_words(rng: np.random.Generator) -> Array:
    """Draw float64 of normal size."""
    return rng.standard_normal(WORDS_IN // 2).view(np.uint32)


def float16_words(rng: np.random.Generator) -> Array:
    """Draw float16 of normal size, subnormals among them."""
    scale = np.exp2(rng.integers(-20, 2, 2 * WORDS_IN))
    return (rng.standard_normal(2 * WORDS_IN) * scale).astype(np.float16).view(np.uint32)


def bfloat16_words(rng: np.random.Generator) -> Array:
    """Draw bfloat16 of normal size, which is float32 cut in half."""
    return (rng.standard_normal(2 * WORDS_IN, np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)


def small_bfloat16_words(rng: np.random.Generator) -> Array:
    """Draw integers of -8 to 8 as bfloat16, whose products and sums are exact."""
    x = rng.integers(-8, 9, 2 * WORDS_IN).astype(np.float32)
    return (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)


def small_e4m3_words(rng: np.random.Generator) -> Array:
    """E4m3 codes of -2, -1, -0.5, 0, 0.5, 1 and 2: their products and sums are exact, however few bits sums have."""
    codes = np.array([0xC0, 0xB8, 0xB0, 0x00, 0x30, 0x38, 0x40], np.uint8)
    return rng.choice(codes, 4 * WORDS_IN).view(np.uint32)


def all_e4m3_words(rng: np.random.Generator) -> Array:
    """Every e4m3 code beside every other."""
    codes = np.arange(256, dtype=np.uint8)
    pairs = np.stack(np.meshgrid(codes, codes), axis=-1).reshape(-1)
    return np.resize(pairs, 4 * WORDS_IN).view(np.uint32)


def e4m3_sized_words(rng: np.random.Generator) -> Array:
    """Float32 of e4m3's sizes: below and above them, in the middle between two, and none."""
    x = rng.standard_normal(WORDS_IN) * np.exp2(rng.integers(-14, 11, WORDS_IN))
    middles = (np.arange(WORDS_IN // 4) % 33 - 16) * np.exp2(rng.integers(-10, 6, WORDS_IN // 4))
    x[: middles.size] = middles
    x[-6:] = 448, -464, 465, np.inf, -np.inf, np.nan
    return x.astype(np.float32).view(np.uint32)


def special_float32_words(rng: np.random.Generator) -> Array:
    """Draw float32 of all sizes, with infinities, zeros and subnormals."""
    words = rng.integers(0, 2**32, WORDS_IN, np.uint32)
    words[: WORDS_IN // 2] = (rng.standard_normal(WORDS_IN // 2) * 30).astype(np.float32).view(np.uint32)
    specials = np.array([0.0, -0.0, np.inf, -np.inf, 1e-40, -1e-40, 1.0, -126.0, 127.99, -150.0], np.float32)
    words[: specials.size] = specials.view(np.uint32)
    values = words.view(np.float32)
    return np.where(np.isnan(values), np.uint32(0x3F800000), words)


def _matrix_loads() -> list[Case]:
    cases = []
    for count, variant in ((4, ""), (4, "_trans"), (2, ""), (2, "_trans")):
        # Lanes point at rows in a scrambled order, lane l at row 7 l + 3 mod 64.
        body = f"""fill(smem, in, 4096);
  unsigned d[{count}];
  ptx::ldmatrix_x{count}{variant}(d, base + (lane * 7 + 3) % 64 * 16);
  for (int i = 0; i < {count}; i++) out[i * 32 + lane] = d[i];"""
        cases.append(Case(f"ldmatrix_x{count}{variant}", "sm_80", body, random_words))
        args = ", ".join(f"in[lane * {count} + {i}]" for i in range(count))
        body = f"""fill(smem, in, 4096);
  ptx::stmatrix_x{count}{variant}(base + (lane * 7 + 3) % 64 * 16, {args});
  __syncwarp();
  for (int i = lane; i < 4096; i += 32) out[i] = reinterpret_cast<unsigned*>(smem)[i];"""
        cases.append(Case(f"stmatrix_x{count}{variant}", "sm_90a", body, random_words))
    body = "out[lane] = ptx::movmatrix_trans(in[lane]);"
    return [*cases, Case("movmatrix_trans", "sm_80", body, random_words)]


def _cp_async() -> list[Case]:
    cases = []
    for size in (16, 8, 4):
        body = f"""fill(smem, in + 4096, 4096);
  for (int n = 0; n <= {size}; n++) {{
    ptx::cp_async_{size}(base + (n * 32 + lane) * {size}, in + (n * 32 + lane) * {size // 4}, n);
    ptx::cp_async_commit_group();
  }}
  ptx::cp_async_wait_group<1>();
  ptx::cp_async_wait_group<0>();
  __syncwarp();
  for (int i = lane; i < 4096; i += 32) out[i] = reinterpret_cast<unsigned*>(smem)[i];"""
        cases.append(Case(f"cp_async_{size}", "sm_80", body, random_words))
    return cases


def _warp_products() -> list[Case]:
    # Fragments are any registers, so d starts from data, too.
    head = "unsigned a[4], b[2]; float d[4];\n  for (int i = 0; i < 4; i++) a[i] = in[lane * 4 + i];"
    head += "\n  for (int i = 0; i < 2; i++) b[i] = in[128 + lane * 2 + i];"
    head += "\n  for (int i = 0; i < 4; i++) d[i] = i + lane * 0.125f;\n  "
    tail = "\n  for (int i = 0; i < 4; i++) out[lane * 4 + i] = __float_as_uint(d[i]);"
    products = {
        "mma_m16n8k16_bf16": ("ptx::mma_m16n8k16<Bfloat>(d, a, b);", bfloat16_words),
        "mma_m16n8k16_f16": ("ptx::mma_m16n8k16<Half>(d, a, b);", float16_words),
        "mma_m16n8k8_f16": (
            "const unsigned c[2] = {a[0], a[1]};\n  ptx::mma_m16n8k8_f16(d, c, b[0]); (void)a[2], (void)b[1];",
            float16_words,
        ),
    }
    cases = [Case(name, "sm_80", head + call + tail, data, tolerance=2e-6) for name, (call, data) in products.items()]
    call = "ptx::mma_m16n8k32_e4m3(d, a, b);"
    cases.append(Case("mma_m16n8k32_e4m3", "sm_89", head + call + tail, small_e4m3_words))
    body = """const double* x = reinterpret_cast<const double*>(in);
  double d[2] = {x[128 + lane], x[256 + lane]};
  ptx::mma_m8n8k4_f64(d, x[lane], x[64 + lane]);
  for (int i = 0; i < 2; i++) out[lane * 2 + i] = __float_as_uint(static_cast<float>(d[i]));"""
    cases.append(Case("mma_m8n8k4_f64", "sm_80", body, float64_words, tolerance=1e-6))
    body = """const double* x = reinterpret_cast<const double*>(in);
  double a[4], b[2], d[4];
  for (int i = 0; i < 4; i++) a[i] = x[32 * i + lane], d[i] = x[192 + 32 * i + lane];
  for (int i = 0; i < 2; i++) b[i] = x[128 + 32 * i + lane];
  ptx::mma_m16n8k8_f64(d, a, b);
  for (int i = 0; i < 4; i++) out[lane * 4 + i] = __float_as_uint(static_cast<float>(d[i]));"""
    return [*cases, Case("mma_m16n8k8_f64", "sm_90", body, float64_words, tolerance=1e-6)]


def _numbers() -> list[Case]:
    cases = []
    for name, tolerance in (("ex2", 4e-7), ("lg2", 4e-7), ("tanh", 6e-4)):
        body = f"for (int i = lane; i < {WORDS_IN}; i += 32) out[i] = __float_as_uint(ptx::{name}(as_float(in[i])));"
        cases.append(Case(name, "sm_80", body, special_float32_words, tolerance=tolerance))
    body = f"""for (int i = lane; i < {WORDS_IN}; i += 32) {{
    out[i] = __float_as_uint(ptx::multiply(as_float(in[i]), as_float(in[{WORDS_IN} - 1 - i])));
  }}"""
    cases.append(Case("multiply", "sm_80", body, special_float32_words))
    for arch, variant in (("sm_80", ""), ("sm_90a", "_of_sm90")):
        body = f"""for (int i = lane; i < {WORDS_IN}; i += 32) {{
    float x = as_float(in[i]), y = as_float(in[{WORDS_IN} - 1 - i]);
    if (x - x != 0) x = 1;  // products with 0 are NaN, whose bits differ
    if (y - y != 0) y = 1;
    const unsigned half = in[{WORDS_IN} - 1] & 0xffff;
    const unsigned word = i % 32 == 0 ? half << 16 | half - i / 32 % 2 : in[i];
    ptx::multiply_below(x, y, word, half * 0x10001u, i % 2 ? -1.0f : 0.0f);
    out[2 * i] = __float_as_uint(x), out[2 * i + 1] = __float_as_uint(y);
  }}"""
        cases.append(Case(f"multiply_below{variant}", arch, body, special_float32_words))
    body = f"""for (int i = lane; i < {WORDS_IN}; i += 32) {{
    const float x = as_float(in[i]), y = as_float(in[{WORDS_IN} - 1 - i]);
    out[2 * i] = ptx::packed_positive<__half>(x, y), out[2 * i + 1] = ptx::packed_positive<__nv_bfloat16>(x, y);
  }}"""
    cases.append(Case("packed_positive", "sm_80", body, special_float32_words))
    # The bits of NaN differ between GPUs, so a NaN is told by what it is.
    body = f"""for (int i = lane; i < {WORDS_IN}; i += 32) {{
    unsigned halves[2];
    ptx::halves_of_e4m3(halves, in[i]);
    for (int k = 0; k < 4; k++) {{
      const unsigned half = halves[k / 2] >> 16 * (k % 2) & 0xffff;
      const unsigned known = (half & 0x7fff) > 0x7c00 ? 0xffff : half;
      out[2 * i + k / 2] |= known << 16 * (k % 2);
    }}
  }}"""
    for arch, variant in (("sm_80", ""), ("sm_89", "_of_sm89")):
        cases.append(Case(f"halves_of_e4m3{variant}", arch, body, all_e4m3_words))
    body = f"""for (int i = 4 * lane; i < {WORDS_IN}; i += 128) {{
    out[i] = ptx::e4m3_of(as_float(in[i]), as_float(in[i + 1]), as_float(in[i + 2]), as_float(in[i + 3]));
  }}"""
    cases.append(Case("e4m3_of", "sm_89", body, e4m3_sized_words))
    return cases


def _barriers() -> list[Case]:
    # Warp 0 hands a value to warp 1, which hands it back changed.
    body = """unsigned* word = reinterpret_cast<unsigned*>(smem);
  if (t < 32) word[lane] = in[lane]; else word[32 + lane] = 0;
  if (t < 32) { ptx::barrier_arrive(1, 64); ptx::barrier_sync(2, 64); out[lane] = word[32 + lane]; }
  else { ptx::barrier_sync(1, 64); word[32 + lane] = word[31 - lane] + 1; ptx::barrier_arrive(2, 64); }"""
    named = Case("barrier_sync_arrive", "sm_80", body, random_words, threads=64)
    body = """int* counter = reinterpret_cast<int*>(out + 64);
  if (t % 32 == 0) {
    while (ptx::load_acquire(counter) != t / 32) {}
    out[0] = out[0] * 3 + t;
    ptx::add_release(counter, 1);
  }"""
    return [named, Case("load_acquire_add_release", "sm_80", body, random_words, threads=128)]


_BARRIER = f"""const unsigned bar = base + {SMEM_BYTES - 1024};
  if (t == 0) {{ ptx::mbarrier_init(bar, ARRIVALS); ptx::fence_mbarrier_init(); }}
  __syncthreads();
  """


def _barrier(arrivals: str) -> str:
    return _BARRIER.replace("ARRIVALS", arrivals)


_WAIT = "while (!ptx::mbarrier_try_wait(bar, 0)) {}\n  "
_DUMP = "for (int i = t; i < 8192; i += blockDim.x) out[i] = reinterpret_cast<unsigned*>(smem)[i];"


def _bulk() -> list[Case]:
    load = _barrier("1") + "fill(smem, in, 8192); ptx::fence_async_shared(); __syncthreads();\n  "
    load += "if (t == 0) { ptx::mbarrier_expect(bar, 1024); ptx::mbarrier_arrive_expect(bar, 48);"
    load += " ptx::bulk_load(base + 128, in + 4, 1024, bar); ptx::bulk_load(base + 4096, in + 400, 48, bar); }\n  "
    store = "fill(smem, in, 8192); ptx::fence_async_shared(); __syncthreads();\n  if (t == 0) { BODY"
    store += " ptx::bulk_commit_group(); ptx::bulk_wait_group_read<0>(); ptx::bulk_wait_group<0>(); }"
    arrive = _barrier("blockDim.x") + "fill(smem, in, 8192);\n  ptx::cp_async_16(base + t * 16, in + t * 4 + 64, 16);"
    arrive += "\n  ptx::cp_async_mbarrier_arrive(bar);\n  "
    twice = "ptx::bulk_reduce_add_f32(reinterpret_cast<float*>(out) + 4, base + 64, 4096);"
    add = "float x[4]; for (int i = 0; i < 4; i++) x[i] = __uint_as_float(in[4 * t + i]);\n  "
    add += "float* sum = reinterpret_cast<float*>(out) + 4 * lane;\n  "
    add += "for (int i = 0; i < 2; i++) ptx::add_f32_x4(sum, x[0], x[1], x[2], x[3]);"
    return [
        Case("bulk_load", "sm_90a", load + _WAIT + _DUMP, random_words),
        Case("bulk_store", "sm_90a", store.replace("BODY", "ptx::bulk_store(out + 4, base + 64, 4096);"), random_words),
        Case("bulk_reduce_add_f32", "sm_90a", store.replace("BODY", twice + twice), float32_words, tolerance=1e-6),
        Case("add_f32_x4", "sm_90a", add, float32_words, threads=64, tolerance=1e-6),
        Case("cp_async_mbarrier_arrive", "sm_90a", arrive + _WAIT + _DUMP, random_words, threads=64),
    ]


# A map, the coordinates of a load (which leaves the tensor at either end) and of a store (which leaves it at its end
# alone: an H200 stops at a store with a negative coordinate, in any dimension), and the bytes of a box. The innermost
# coordinate is a multiple of 16 bytes. Two tensors have rows that end within 16 bytes.
_BOXES = (
    ("3d", Map("float32", (42, 9, 5), (176, 1600), (32, 8, 2)), "-4, 3, 4", "12, 3, 4", 2048),
    ("3d_swizzle_32", Map("bfloat16", (40, 9, 5), (80, 720), (16, 8, 2), 32), "32, -2, 1", "32, 4, 4", 512),
    ("3d_swizzle_64", Map("float32", (40, 9, 5), (176, 1600), (16, 8, 2), 64), "28, -2, 1", "28, 2, 4", 1024),
    (
        "4d_swizzle_128",
        Map("bfloat16", (100, 30, 3, 2), (208, 6240, 18720), (64, 16, 1, 2), 128),
        "64, 20, 2, -1",
        "64, 20, 2, 1",
        4096,
    ),
    (
        "5d_swizzle_128",
        Map("bfloat16", (64, 30, 2, 3, 2), (256, 128, 7680, 23040), (64, 16, 2, 1, 1), 128),
        "0, 22, 0, 1, 1",
        "0, 22, 0, 1, 1",
        4096,
    ),
)


def _tma() -> list[Case]:
    cases = []
    for name, tensor, load_at, store_at, size in _BOXES:
        body = _barrier("1") + f"if (t == 0) {{ ptx::tma_prefetch_map(&map); ptx::mbarrier_arrive_expect(bar, {size});"
        body += f" ptx::tma_load(base + 2048, &map, bar, {load_at}); }}\n  {_WAIT}"
        body += f"for (int i = t; i < {size // 4}; i += 32) out[i] = reinterpret_cast<unsigned*>(smem + 2048)[i];"
        cases.append(Case(f"tma_load_{name}", "sm_90a", body, random_words, map=tensor))
        body = "fill(smem, in, 8192); ptx::fence_async_shared(); __syncthreads();\n  if (t == 0) {"
        body += (
            f" ptx::tma_store(&map, base + 2048, {store_at}); ptx::bulk_commit_group(); ptx::bulk_wait_group<0>(); }}"
        )
        into = replace(tensor, of_out=True)
        cases.append(Case(f"tma_store_{name}", "sm_90a", body, random_words, map=into))
        if tensor.dtype == "float32":
            sums = body.replace("tma_store", "tma_reduce_add")
            cases.append(Case(f"tma_reduce_add_{name}", "sm_90a", sums, float32_words, map=into))
    return cases


def _clusters() -> list[Case]:
    join = "ptx::cluster_arrive(); ptx::cluster_wait();\n  "
    dump = "for (int i = t; i < 4096; i += 32) out[ptx::cluster_rank() * 4096 + i] ="
    dump += f" reinterpret_cast<unsigned*>(smem)[i];\n  {join}"
    tensor = Map("bfloat16", (100, 30, 3, 2), (208, 6240, 18720), (64, 16, 1, 1), 128)
    multicast = _barrier("1") + "fill(smem, in, 4096); ptx::fence_async_shared();\n  " + join
    multicast += "if (t == 0) { ptx::mbarrier_arrive_expect(bar, 4096); const unsigned rank = ptx::cluster_rank();"
    multicast += " ptx::tma_load_multicast(base + 1024 + rank * 2048, &map, bar, 3, 64 * rank, 5, rank, 1); }\n  "
    remote = _barrier("33") + "fill(smem, in + 64 * ptx::cluster_rank(), 4096); ptx::fence_async_shared();\n  " + join
    remote += "const unsigned other = ptx::cluster_rank() ^ 1, far = ptx::cluster_address(bar, other);\n  "
    remote += "if (t == 0) { ptx::mbarrier_arrive_expect(bar, 512);"
    remote += " ptx::bulk_copy_cluster(ptx::cluster_address(base + 256, other), base + 8192, 512, far); }\n  "
    remote += "ptx::mbarrier_arrive_cluster(far);\n  while (!ptx::mbarrier_try_wait_cluster(bar, 0)) {}\n  "
    stored = "fill(smem, in, 4096);\n  " + join + "const unsigned to = base + 2048 + 16 * (31 - lane);\n  "
    stored += "float x[4]; for (int i = 0; i < 4; i++) x[i] = as_float(in[4 * t + i] + ptx::cluster_rank());\n  "
    stored += "ptx::store_cluster_x4(ptx::cluster_address(to, ptx::cluster_rank() ^ 1), x[0], x[1], x[2], x[3]);\n  "
    stored += join
    return [
        Case("tma_load_multicast", "sm_90a", multicast + _WAIT + dump, random_words, cluster=2, map=tensor),
        Case("bulk_copy_cluster", "sm_90a", remote + dump, random_words, cluster=2),
        Case("store_cluster_x4", "sm_90a", stored + dump, random_words, cluster=2),
    ]


def _wgmma(columns: int, kind: str, swizzle: int, trans_a: int, trans_b: int, exact: bool) -> Case:
    # The operands are whatever lies in shared memory: any offsets are a test of the descriptor's meaning. (start, and
    # leading and stride offsets in 16 bytes, of a and b.)
    code = {128: 1, 64: 2, 32: 3, 0: 0}[swizzle]
    panel, step = 16384 if swizzle else 2048, 8 * (swizzle or 16)
    high = f"(({code}ull << 62) | ({step // 16}ull << 32) | ({panel // 16}ull << 16))"
    element, further = {"bf16": "Bfloat", "f16": "Half"}[kind], 2 if swizzle > 32 else 0
    body = f"""fill(smem, in, {SMEM_BYTES // 4}); ptx::fence_async_shared(); __syncthreads();
  float d[{columns // 2}];
  for (int i = 0; i < {columns // 2}; i++) d[i] = (i + t) % 16;
  const unsigned long long a = {high} | (base >> 4), b = {high} | ((base + 8192) >> 4);
  ptx::wgmma_fence();
  ptx::wgmma_ss<{element}, {trans_a}, {trans_b}>(d, a, b, true);
  ptx::wgmma_rs<{element}, {trans_b}>(d, in[t], in[t + 128], in[t + 256], in[t + 384], b + {further}, true);
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  for (int i = 0; i < {columns // 2}; i++) ptx::keep(d[i]);
  for (int i = 0; i < {columns // 2}; i++) out[t * {columns // 2} + i] = __float_as_uint(d[i]);"""
    data = small_bfloat16_words if exact else {"bf16": bfloat16_words, "f16": float16_words}[kind]
    name = f"wgmma_n{columns}_{kind}_swizzle{swizzle}_{'t' if trans_a else 'n'}{'t' if trans_b else 'n'}"
    name += "_exact" if exact else ""
    return Case(name, "sm_90a", body, data, threads=128, tolerance=0.0 if exact else 1e-5)


def _wgmma_e4m3(columns: int, swizzle: int) -> Case:
    code = {128: 1, 64: 2, 32: 3, 0: 0}[swizzle]
    panel, step = 16384 if swizzle else 2048, 8 * (swizzle or 16)
    high = f"(({code}ull << 62) | ({step // 16}ull << 32) | ({panel // 16}ull << 16))"
    further = 2 if swizzle > 32 else 0
    body = f"""fill(smem, in, {SMEM_BYTES // 4}); ptx::fence_async_shared(); __syncthreads();
  float d[{columns // 2}];
  for (int i = 0; i < {columns // 2}; i++) d[i] = (i + t) % 16;
  const unsigned long long a = {high} | (base >> 4), b = {high} | ((base + 8192) >> 4);
  ptx::wgmma_fence();
  ptx::wgmma_e4m3_ss(d, a, b, true);
  ptx::wgmma_e4m3_rs(d, in[t], in[t + 128], in[t + 256], in[t + 384], b + {further}, true);
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  for (int i = 0; i < {columns // 2}; i++) ptx::keep(d[i]);
  for (int i = 0; i < {columns // 2}; i++) out[t * {columns // 2} + i] = __float_as_uint(d[i]);"""
    return Case(f"wgmma_n{columns}_e4m3_swizzle{swizzle}", "sm_90a", body, small_e4m3_words, threads=128)


def _warpgroup_products() -> list[Case]:
    cases = [_wgmma(64, "bf16", s, ta, tb, True) for s in (128, 64, 32, 0) for ta in (0, 1) for tb in (0, 1)]
    widths = (16, 32, 48, 80, 96, 112, 128, 192, 256)
    cases += [_wgmma(n, "bf16", 128, 0, n // 16 % 2, True) for n in widths]
    cases += [_wgmma_e4m3(n, swizzle) for n, swizzle in ((64, 128), (64, 0), (96, 128), (256, 64))]
    return [*cases, _wgmma(128, "bf16", 128, 0, 1, False), _wgmma(128, "f16", 128, 0, 0, False)]


CASES: list[Case] = [
    *_matrix_loads(), *_cp_async(), *_warp_products(), *_numbers(), *_barriers(), *_bulk(), *_tma(), *_clusters(),
    *_warpgroup_products(),
]  # fmt: skip

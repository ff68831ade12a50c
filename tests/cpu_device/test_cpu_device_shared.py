"""The CPU device's check of shared memory tells members, padding and written bytes apart."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from cpu_device import build, device, tensor_map
from cpu_device.device import Check, DeviceError

from cuflash.cuda import source as cuda_source

pytestmark = pytest.mark.skipif(not device.available(), reason=device.NO_COMPILER)
UNINITIALISED = "uninitialised shared memory is read"
OUT_OF_BOUNDS = "shared memory out of bounds"


def said(text: str, threads: int = 32, grid: int = 1, smem_bytes: int = 4096) -> str:
    """Return what the checked mode says of the kernel `k`; empty if nothing."""
    source = cuda_source.source_of("ptx/sm90.cuh", {}) + text
    sums = np.zeros(64, np.float32)
    try:
        device.compile(source, (), "shared", Check.SHARED).launch("k", (grid,), (threads,), (sums,), smem_bytes)
    except DeviceError as defect:
        return str(defect)
    return ""


# The struct has 24 bytes, of which 3 behind `last` and 4 behind `key` are padding.
PADDED = """
struct Entry {{ long long sum; int turn; bool last; int key; }};
struct SharedStorage {{ int before[5]; Entry entries[{count}]; Entry other; }};
extern "C" __global__ void k(float* sums) {{
  extern __shared__ __align__(16) unsigned char bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(bytes);
  volatile int i = {count} - 1;
  if (threadIdx.x == 0) {{ {write} }}
  __syncthreads();
  const Entry entry = shared.entries[i];
  sums[threadIdx.x] = {read};
}}
"""
WHOLE = "shared.entries[i] = {1, 2, true, 3};"
SUM_ALONE = "shared.entries[i].sum = 1;"
ALL_MEMBERS = "entry.sum + entry.turn + entry.last + entry.key"


@pytest.mark.parametrize("count", [1, 2, 100])
def test_padding_that_is_copied_with_a_struct_is_no_defect(count: int) -> None:
    assert said(PADDED.format(count=count, write=WHOLE, read=ALL_MEMBERS)) == ""


@pytest.mark.skipif(not build.is_gnu(), reason=build.NO_COMPILER or "only g++ tells where a struct has padding")
@pytest.mark.parametrize("write", [SUM_ALONE, WHOLE.replace("{1, 2, true, 3}", "shared.other")])
def test_members_that_are_copied_with_a_struct_are_written(write: str) -> None:
    assert UNINITIALISED in said(PADDED.format(count=3, write=write, read=ALL_MEMBERS))


def test_a_struct_of_which_nothing_is_written_is_a_defect_whichever_the_compiler() -> None:
    assert UNINITIALISED in said(PADDED.format(count=3, write="", read=ALL_MEMBERS))


MEMBERS = """
constexpr int TEAMS = {teams};
struct Base {{ float first[3]; }};
struct SharedStorage : Base {{ float second[4], third[4]; alignas(64) float fourth[4]; }};
extern "C" __global__ void k(float* sums) {{
  extern __shared__ __align__(64) unsigned char bytes[];
  SharedStorage& shared = reinterpret_cast<SharedStorage*>(bytes)[TEAMS - 1];
  float* row = shared.{member};
  volatile int i = {index};
  if (threadIdx.x == 0) row[i] = 1;
}}
"""


@pytest.mark.parametrize("teams", [1, 2])
@pytest.mark.parametrize(
    ("member", "index"), [("first", 3), ("second", -1), ("third", 4), ("fourth", -1), ("fourth", 4)]
)
def test_between_members_lies_nothing(teams: int, member: str, index: int) -> None:
    """Nothing lies between members of a base, and of each of several storages, either."""
    assert OUT_OF_BOUNDS in said(MEMBERS.format(teams=teams, member=member, index=index))
    assert said(MEMBERS.format(teams=teams, member=member, index=0)) == ""


CLUSTER_COPY = """
struct SharedStorage {{ alignas(16) float sent[4]; alignas(16) float received[4]; unsigned long long full; }};
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(float* sums) {{
  extern __shared__ __align__(16) unsigned char bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(bytes);
  const unsigned full = ptx::shared_address(&shared.full);
  if (threadIdx.x == 0) {{
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
  }}
  __syncwarp();
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (threadIdx.x == 0 && ptx::cluster_rank() == 0) {{
    shared.sent[0] = 1;
    ptx::fence_async_shared();
    ptx::bulk_copy_cluster(ptx::cluster_address(ptx::shared_address(shared.received), 1),
                           ptx::shared_address(shared.sent), 16, ptx::cluster_address(full, 1));
  }} else if (threadIdx.x == 0) {{
    ptx::mbarrier_arrive_expect(full, 16);
    while (!ptx::mbarrier_try_wait(full, 0)) {{}}
    sums[0] = shared.received[{element}];
  }}
  __syncwarp();
  ptx::cluster_arrive();
  ptx::cluster_wait();
}}
"""


def test_what_nobody_wrote_may_be_copied_and_not_be_read() -> None:
    assert said(CLUSTER_COPY.format(element=0), grid=2) == ""
    assert UNINITIALISED in said(CLUSTER_COPY.format(element=1), grid=2)


CLUSTER_STORE = """
struct SharedStorage {{ alignas(16) float received[4]; }};
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(float* sums) {{
  extern __shared__ __align__(16) unsigned char bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(bytes);
  const unsigned rank = ptx::cluster_rank(), received = ptx::shared_address(shared.received);
  if (threadIdx.x == 0) {{
    ptx::store_cluster_x4(ptx::cluster_address(received, {target}), 1, 2, 3, 4);
  }}
  __syncwarp();
  ptx::cluster_arrive();
  {early}
  ptx::cluster_wait();
  if (threadIdx.x == 0) sums[rank] = shared.received[rank];
}}
"""


def test_stores_to_another_block_are_seen_behind_a_barrier() -> None:
    read = "if (threadIdx.x == 0) sums[rank] = shared.received[0];"
    assert said(CLUSTER_STORE.format(target="rank ^ 1", early=""), grid=2) == ""
    assert said(CLUSTER_STORE.format(target="rank ^ 1", early=read), grid=2) != ""
    assert UNINITIALISED in said(CLUSTER_STORE.format(target="0", early=""), grid=2)


STORE = """
struct SharedStorage {{ alignas(128) unsigned short rows[8][64]; }};
extern "C" __global__ void k(const __grid_constant__ ptx::TensorMap map) {{
  extern __shared__ __align__(1024) unsigned char bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(bytes);
  for (int row = 0; row < 8; row++) {{
    for (int column = threadIdx.x; column < {written}; column += 32) {{
      const int chunk = column / 8 ^ row % 8;  // TMA's swizzle
      shared.rows[row][chunk * 8 + column % 8] = 0;
    }}
  }}
  ptx::fence_async_shared();
  __syncwarp();
  if (threadIdx.x == 0) {{
    ptx::tma_store(&map, ptx::shared_address(shared.rows), 0, 0, 0);
    ptx::bulk_commit_group();
    ptx::bulk_wait_group_read<0>();
  }}
}}
"""


@pytest.mark.parametrize(("written", "expected"), [(32, ""), (24, UNINITIALISED)])
def test_a_store_by_tma_reads_what_lies_in_the_tensor(written: int, expected: str) -> None:
    out = np.ones((8, 32), ml_dtypes.bfloat16)
    encoded = tensor_map.encode(out.ctypes.data, "bfloat16", (32, 8, 1), (64, out.nbytes), (64, 8, 1))
    source = cuda_source.source_of("ptx/sm90.cuh", {}) + STORE.format(written=written)
    module = device.compile(source, (), "shared", Check.SHARED)
    if expected:
        with pytest.raises(DeviceError, match=expected):
            module.launch("k", (1,), (32,), (encoded,), 1024)
    else:
        module.launch("k", (1,), (32,), (encoded,), 1024)
        assert not out.any()

"""Keys in host memory, beside the link's own rate and beside the same keys in the GPU's memory.

    python examples/benchmarks/offload.py [--cells NAME ...] [--quick] [--commit COMMIT] [--json FILE]

8 KV heads, 32 query heads, nothing is masked. The cells:

link      GB/s of plain copies of 64 MiB from and to pinned memory, the ideal of the others; it is always measured
stream    few queries, where the link is the bottleneck, from pinned and from pageable memory
kernels   many queries, where the kernels are the bottleneck, in both directions
decode    one query: streaming alone, with the share that the CPU is found to have, and the CPU alone
cache     one query over a `PagedCache` half of whose pages lie in host memory: streaming them, and the CPU alone

A time is the median of several calls by the host's clock, until the stream is done. `gpu` are the same arrays in the
GPU's memory; `apart` is the largest difference of two results that should be the same. It needs a GPU, and for decode
9 GB of host memory that can be pinned. With --quick there is a quarter of the keys, and of the time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import recording
from cpu import available_cores, cpu_model

import cuflash
from cuflash import offload
from cuflash.interop import dtype_of

Call = Callable[[], Any]
Line = dict[str, Any]

HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
DTYPES = ("bfloat16", "float32")
STREAM_KEYS, DECODE_KEYS, CACHE_KEYS = 1 << 18, 1 << 20, 1 << 18
FEW_QUERIES, MANY_QUERIES = (1, 512), 1 << 14
PAGE_SIZE, PROMPTS = 16, 16
CHUNK_BYTES, MOST_CHUNKS = 64 << 20, 16
# Numbers that are drawn before they repeat: those of 16k keys. Values begin some bytes off, so that they are others.
DRAWN, SHIFT = 16384 * HEADS_KV * HEAD_DIM, 4096
QUICK = 4
WARM_UP, LEAST_ROUNDS, MOST_ROUNDS = 4, 3, 15


def normal(xp: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Normal numbers."""
    return xp.random.default_rng(0).standard_normal(shape, dtype=np.float32).astype(dtype_of(dtype))


def filled(num_keys: int, is_pinned: bool) -> Any:
    """Bytes of keys and values, from whose beginning every cell takes its own, as to pin and fill them takes seconds.

    They are normal numbers in bfloat16. Two of these are one in float32, about as large as the second one.
    """
    size = 2 * num_keys * HEADS_KV * HEAD_DIM * 4 + SHIFT
    memory: Any = offload.pinned_empty(size, np.uint8) if is_pinned else np.empty(size, np.uint8)
    numbers = normal(np, (min(DRAWN, size // 2),), "bfloat16").view(np.uint8)
    for first in range(0, size, numbers.size):
        memory[first : first + numbers.size] = numbers[: size - first]
    return memory


class Bench:
    """What the cells measure with: an array library, memory of the host, and the link's rate once it is known."""

    def __init__(self, xp: Any, most_keys: int, fewer: int = 1) -> None:
        self.xp, self.fewer, self.link = xp, fewer, math.nan
        self.memory = {"pinned": filled(most_keys // fewer, True)}

    def keys(self, count: int, dtype: str, head_dim: int = HEAD_DIM, kind: str = "pinned") -> list[Any]:
        """Keys and values in host memory."""
        if kind not in self.memory:
            self.memory[kind] = filled(count, False)
        shape, own = (1, count, HEADS_KV, head_dim), dtype_of(dtype)
        size = math.prod(shape) * own.itemsize
        return [self.memory[kind][first : first + size].view(own).reshape(shape) for first in (0, size + SHIFT)]

    def seconds(self, calls: dict[str, Call], warm_up: int = WARM_UP) -> dict[str, float]:
        """The median time of each call; they take turns."""
        once = [self._round(calls) for _ in range(warm_up)][-1]
        rounds = min(max(LEAST_ROUNDS, int(1 / self.fewer / sum(once))), MOST_ROUNDS)
        times = zip(*(self._round(calls) for _ in range(rounds)), strict=True)
        return {name: statistics.median(own) for name, own in zip(calls, times, strict=True)}

    def _round(self, calls: dict[str, Call]) -> list[float]:
        times = []
        for call in calls.values():
            self._wait()
            start = time.perf_counter()
            call()
            self._wait()
            times.append(time.perf_counter() - start)
        return times

    def _wait(self) -> None:
        if self.xp is not np:
            self.xp.cuda.get_current_stream().synchronize()


def rates(num_bytes: int, times: dict[str, float]) -> Line:
    """Return times and GB/s, as a line has them."""
    return {"seconds": times, "gigabytes_per_second": {name: num_bytes / x / 1e9 for name, x in times.items()}}


def apart(calls: dict[str, Call], *names: str) -> float:
    """The largest difference of two calls' results."""
    one, other = (calls[name]().astype(np.float32) for name in names)
    return float(abs(one - other).max())


def link(bench: Bench) -> Line:
    """Copies through two buffers of the GPU; those back write what was there, as all chunks are equal."""
    runtime, memory = bench.xp.cuda.runtime, bench.memory["pinned"]
    buffers = [bench.xp.empty(CHUNK_BYTES, np.uint8) for _ in range(2)]
    count = min(MOST_CHUNKS, memory.size // CHUNK_BYTES)
    stream = bench.xp.cuda.Stream(non_blocking=True)

    def copy(to_host: bool) -> None:
        kind = runtime.memcpyDeviceToHost if to_host else runtime.memcpyHostToDevice
        for n in range(count):
            ends = buffers[n % 2].data.ptr, memory.ctypes.data + n * CHUNK_BYTES
            target, source = reversed(ends) if to_host else ends
            runtime.memcpyAsync(target, source, CHUNK_BYTES, kind, stream.ptr)
        stream.synchronize()

    line = rates(count * CHUNK_BYTES, bench.seconds({"in": lambda: copy(False), "out": lambda: copy(True)}))
    bench.link = line["gigabytes_per_second"]["in"]
    return {"cell": "link", **line}


def stream(bench: Bench, kind: str, dtype: str, queries: int) -> Line:
    """Few queries."""
    k, v = bench.keys(STREAM_KEYS // bench.fewer, dtype, kind=kind)
    gpu, q = [bench.xp.asarray(x) for x in (k, v)], normal(bench.xp, (1, queries, HEADS, HEAD_DIM), dtype)
    calls = {"host": lambda: offload.attention(q, k, v, share=0), "gpu": lambda: cuflash.attention(q, *gpu)}
    line: Line = {"cell": f"stream {dtype}, {queries} x {k.shape[1]}, {kind}", "memory": kind}
    line |= rates(k.nbytes + v.nbytes, bench.seconds(calls))
    of_link = line["gigabytes_per_second"]["host"] / bench.link
    return {**line, "of_link": of_link, "apart": apart(calls, "host", "gpu")}


def kernels(bench: Bench, direction: str, most_keys: int) -> Line:
    """Many queries; backward, dk and dv go to pinned memory."""
    k, v = bench.keys(most_keys // bench.fewer, "bfloat16")
    gpu, q = [bench.xp.asarray(x) for x in (k, v)], normal(bench.xp, (1, MANY_QUERIES, HEADS, HEAD_DIM), "bfloat16")
    calls = {"host": lambda: offload.attention(q, k, v, share=0), "gpu": lambda: cuflash.attention(q, *gpu)}
    line: Line = {"cell": f"kernels {direction}, {MANY_QUERIES} x {k.shape[1]}", "apart": apart(calls, "host", "gpu")}
    flops = 4.0 * MANY_QUERIES * k.shape[1] * HEADS * HEAD_DIM
    if direction == "backward":
        (_, own), (_, its) = offload.attention_vjp(q, k, v, share=0), cuflash.attention_vjp(q, *gpu)
        grads = None, *(offload.pinned_empty(x.shape, x.dtype) for x in (k, v))
        calls, flops = {"host": lambda: own(q, out=grads), "gpu": lambda: its(q)}, 2.5 * flops
    times = bench.seconds(calls)
    line |= {"seconds": times, "tflops": {name: flops / x / 1e12 for name, x in times.items()}}
    return {**line, "of_kernels": times["gpu"] / times["host"]}


def decode(bench: Bench, dtype: str, head_dim: int) -> Line:
    """One query; the first calls with a share of "auto" find it."""
    k, v = bench.keys(DECODE_KEYS // bench.fewer, dtype, head_dim)
    q = normal(bench.xp, (1, 1, HEADS, head_dim), dtype)
    calls = {"host": lambda: offload.attention(q, k, v, share=0), "auto": lambda: offload.attention(q, k, v)}
    alone = {"cpu": lambda: offload.attention(q, k, v, share=1)}
    times = bench.seconds(calls) | bench.seconds(alone, warm_up=1)
    line = {"cell": f"decode {dtype}, {k.shape[1]} keys, d{head_dim}", **rates(k.nbytes + v.nbytes, times)}
    line |= {"of_streaming": times["host"] / times["auto"], "ideal": 1 + times["host"] / times["cpu"]}
    return {**line, "apart": apart(calls | alone, "host", "cpu")}


def cache(bench: Bench, dtype: str) -> Line:
    """A step's attention; the rate is of the keys in host memory, beside which the others take little time."""
    keys = CACHE_KEYS // bench.fewer
    pages = keys // PAGE_SIZE // 2
    held = cuflash.PagedCache(1, pages, PAGE_SIZE, HEADS_KV, HEAD_DIM, dtype, bench.xp, host_pages=pages + 1)
    sequence, rows = held.add(), normal(bench.xp, (1, keys // PROMPTS, HEADS_KV, HEAD_DIM), dtype)
    for count in (*[keys // PROMPTS] * PROMPTS, 1):
        step, own = held.step([sequence], count), rows[:, :count]
        step.append(0, own, own, own)
    q = normal(bench.xp, (1, 1, HEADS, HEAD_DIM), dtype)
    calls = {"host": lambda: step.attend(0, q, share=0), "cpu": lambda: step.attend(0, q, share=1)}
    cold = step.num_host_pages * PAGE_SIZE * 2 * HEADS_KV * HEAD_DIM * dtype_of(dtype).itemsize
    line: Line = {"cell": f"cache {dtype}, {keys} keys", "on_host": step.num_host_pages / (2 * pages + 1)}
    line |= rates(cold, bench.seconds(calls, warm_up=2))
    of_link = line["gigabytes_per_second"]["host"] / bench.link
    return {**line, "of_link": of_link, "apart": apart(calls, "host", "cpu")}


# Each part's function, and the further arguments of its cells.
PARTS: dict[str, tuple[Callable[..., Line], Sequence[tuple[Any, ...]]]] = {
    "link": (link, [()]),
    "stream": (stream, list(product(("pinned", "pageable"), DTYPES, FEW_QUERIES))),
    "kernels": (kernels, [("forward", 1 << 17), ("backward", 1 << 16)]),
    "decode": (decode, list(product(DTYPES, (HEAD_DIM, HEAD_DIM // 2)))),
    "cache": (cache, [(dtype,) for dtype in DTYPES]),
}


def in_words(line: Line) -> str:
    """One line of the record, as it is printed."""
    name, unit = ("tflops", "TFLOP/s") if "tflops" in line else ("gigabytes_per_second", "GB/s")
    shown = [f"{of} {1e3 * line['seconds'][of]:.2f} ms {rate:.1f} {unit}" for of, rate in line[name].items()]
    ratios = ("of_link", "of_kernels", "of_streaming", "ideal", "on_host")
    shown += [f"{ratio} {line[ratio]:.3f}" for ratio in ratios if ratio in line]
    return f"{line['cell']}: {', '.join(shown)}" + (f", apart {line['apart']:.1e}" if "apart" in line else "")


def main() -> None:
    """Measure, print and record."""
    parser = recording.parser_of(__doc__)
    parser.add_argument("--cells", nargs="+", choices=PARTS, default=tuple(PARTS), help="(default: all)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} times fewer keys, and less time")
    args = parser.parse_args()
    xp = recording.gpu_of(parser)
    recorder = recording.Recorder(args, xp, "offload", cpu=cpu_model(), cores=available_cores(), quick=args.quick)
    bench = Bench(xp, DECODE_KEYS if "decode" in args.cells else STREAM_KEYS, QUICK if args.quick else 1)
    measured: list[Line] = []
    for part, (measure, cells) in PARTS.items():
        for cell in cells if part in ("link", *args.cells) else ():
            measured.append({"part": part, **measure(bench, *cell)})
            print(in_words(measured[-1]), flush=True)
            recorder.write(measured)


if __name__ == "__main__":
    main()

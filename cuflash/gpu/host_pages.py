"""A GPU gathers rows of pages that lie in pinned host memory, which it reads over the link by their own addresses."""

from __future__ import annotations

import math

import numpy as np

from cuflash.cuda import device as cuda_device
from cuflash.cuda.struct import Member, Struct
from cuflash.gpu.arguments import BoundLaunch
from cuflash.hardware import ALIGNMENT
from cuflash.problem.attention_problem import Array

_FILE, _ENTRY = "around/host_pages", "gather_host_pages"
_THREADS = 512
_WORDS = 4  # that a thread has at a time: AT_ONCE of around/host_pages.cu
# So many thread blocks keep a megabyte under way, which is more than a link needs, and leave the others to attention.
_MOST_BLOCKS = 32
_MOST_PAGES = 992  # of a launch, whose parameters have 4096 bytes
_MOST_INDEX = 2**31 - 1  # the kernel counts words in 32 bits up to here, its last step beyond the end included
_WORD_TYPES = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "uint2", 16: "uint4"}
_PARAMS = Struct(
    "HostPagesParams",
    [
        Member("target", "Word*", np.dtype("u8"), "rows of a sequence lie side by side"),
        Member("pool", "const Word*", np.dtype("u8"), "rows of a page lie side by side"),
        Member("sequences", "u64", np.dtype("u8")),
        Member("words", "u64", np.dtype("u8"), "of each sequence"),
        Member("target_stride", "u64", np.dtype("u8"), "from sequence to sequence, in words"),
        Member("skipped", "u64", np.dtype("u8"), "words of each sequence's first page before its first row"),
        Member("pages_each", "u64", np.dtype("u8"), "pages of each sequence"),
        Member("page_words", "u64", np.dtype("u8")),
        Member("page_stride", "i64", np.dtype("i8"), "from page to page, in words"),
        Member("pages", "PageNumbers", np.dtype((np.int32, (_MOST_PAGES,)))),
    ],
)


def gather(target: Array, pool: np.ndarray, pages: np.ndarray, first: int, stream: int) -> None:
    """Enqueue copies of some keys' rows, from row `first` of each sequence's first page on.

    Parameters
    ----------
    target : array (sequences, keys, ...)
        Contiguous, on the device.
    pool : NumPy array (num_pages, page_size, ...)
        In pinned memory, where each page is contiguous.
    pages : integer NumPy array (sequences, pages)
        Those that have the keys of each sequence, all of them in the pool.
    first : int
        Less than page_size.
    stream : int
        The handle of a stream.
    """
    device = cuda_device.device_of(target)
    page_size, row, keys = pool.shape[1], pool[0, 0].nbytes, target.shape[1]
    begin, source = device.pointer(target), pool.ctypes.data
    places = begin | source | pool.strides[0] | page_size * row | first * row | keys * row | ALIGNMENT
    width = places & -places  # the widest word that divides all of these
    # A launch has many sequences of few pages, or some pages of one sequence.
    of_launch = max(1, _MOST_PAGES // pages.shape[1])
    most_words = min(pages.size, _MOST_PAGES) * page_size * row // width
    constants: dict[str, str | int] = {
        "word": _WORD_TYPES[width],
        "index": "unsigned int" if most_words <= _MOST_INDEX else "unsigned long long",
        "threads": _THREADS,
        "most_pages": _MOST_PAGES,
    }
    kernel = cuda_device.get(_FILE, _ENTRY, constants, device, 0, _PARAMS.headers)
    for sequence in range(0, len(pages), of_launch):
        for place in range(0, pages.shape[1], _MOST_PAGES):
            own = pages[sequence : sequence + of_launch, place : place + _MOST_PAGES]
            key = max(0, place * page_size - first)
            stop = min(keys, (place + own.shape[1]) * page_size - first)
            words = (stop - key) * row // width
            params = np.zeros(1, _PARAMS.dtype)
            p = params[0]
            p["target"], p["pool"] = begin + (sequence * keys + key) * row, source
            p["sequences"], p["words"], p["target_stride"] = len(own), words, keys * row // width
            p["skipped"] = 0 if place else first * row // width
            p["pages_each"], p["page_words"] = own.shape[1], page_size * row // width
            p["page_stride"] = pool.strides[0] // width
            p["pages"][: own.size] = own.ravel()
            blocks = min(_MOST_BLOCKS, math.ceil(len(own) * words / (_THREADS * _WORDS)))
            launch = kernel.bound((blocks,), (_THREADS,), [params.nbytes], 0)
            BoundLaunch((params,), (), launch).enqueue((), (), None, stream)

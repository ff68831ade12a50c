"""Parameters that are too many for a kernel: small launches write them to device memory, from which it reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cuflash.cuda import device as cuda_device
from cuflash.cuda.struct import Member, Struct
from cuflash.gpu.arguments import BoundLaunch
from cuflash.gpu.params import OPERAND_PARAMS, Arrays
from cuflash.kept import Kept
from cuflash.problem.attention_problem import Array

_FILE, _ENTRY = "around/store_words", "store_words"
_THREADS = 256
_MOST_WORDS = 500  # that a launch takes by value, of the 512 of its parameters
_PARAMS = Struct(
    "StoreParams",
    [
        Member("target", "u64*", np.dtype("u8")),
        Member("first", "i64", np.dtype("i8"), "the first word that is written"),
        Member("count", "i64", np.dtype("i8"), "words that are written"),
        Member("words", "Words", np.dtype((np.uint64, (_MOST_WORDS,)))),
    ],
)
_WORDS = _PARAMS.offset("words") // 8


class _Launch(BoundLaunch):
    """A store's launch; `places` are those of pointers among its words."""

    def __init__(self, device: cuda_device.Device, words: Array, first: int, places: Sequence[int]) -> None:
        params = np.zeros(1, _PARAMS.dtype)
        params["first"], params["count"] = first, words.size
        params["words"][0, : words.size] = words
        constants: dict[str, str | int] = {"threads": _THREADS, "most_words": _MOST_WORDS}
        kernel = cuda_device.get(_FILE, _ENTRY, constants, device, 0, _PARAMS.headers)
        pointers = _PARAMS.offset("target") // 8, *(_WORDS + place for place in places)
        super().__init__([params], pointers, kernel.bound((1,), (_THREADS,), [params.nbytes], 0))


_launches: Kept[Any, _Launch] = Kept()


def stores(
    device: cuda_device.Device, params: Array, places: Mapping[str, int], operands: Arrays, target: Array
) -> Iterator[tuple[_Launch, Arrays]]:
    """Yield launches that write a struct to `target`, and their arrays; `places` are the words of its pointers."""
    words = params.view(np.uint64)
    for first in range(0, words.size, _MOST_WORDS):
        own = {name: place - first for name, place in places.items() if first <= place < first + _MOST_WORDS}
        part = words[first : first + _MOST_WORDS]
        key = device, first, part.tobytes(), tuple(own.values())
        launch = _launches.get(key)
        if launch is None:
            launch = _launches[key] = _Launch(device, part, first, tuple(own.values()))
        yield launch, {OPERAND_PARAMS: target, **{name: operands[name] for name in own}}

"""Parameters that are too many for a kernel: small launches write them to device memory, from which it reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cuflash.cuda import device as cuda_device
from cuflash.cuda.struct import Member, Struct
from cuflash.gpu.arguments import Arguments
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


class _Launch:
    """A store's `replay.Launch`; `places` are those of pointers among its words."""

    def __init__(self, device: cuda_device.Device, words: Array, first: int, places: Sequence[int]) -> None:
        self.pointer_words = (_PARAMS.offset("target") // 8, *(_WORDS + place for place in places))
        params = np.zeros(1, _PARAMS.dtype)
        params["first"], params["count"] = first, words.size
        params["words"][0, : words.size] = words
        constants: dict[str, str | int] = {"threads": _THREADS, "most_words": _MOST_WORDS}
        kernel = cuda_device.get(_FILE, _ENTRY, constants, device, 0, _PARAMS.headers)
        self._values = (params,)
        self._launch = kernel.bound((1,), (_THREADS,), [params.nbytes], 0)
        # Arguments that no thread uses, as in `launch.Launch`.
        self._free: list[Arguments] = []

    def enqueue(
        self, addresses: Sequence[int], places: Iterable[tuple[int, int]], seed: int | None, stream: int
    ) -> None:
        """Enqueue the kernel: see `replay.Launch`."""
        try:
            arguments = self._free.pop()
        except IndexError:
            arguments = Arguments(self._values)
        for word, place in places:
            arguments.words[word] = addresses[place]
        self._launch(arguments.address, stream)
        self._free.append(arguments)


_launches: Kept[Any, _Launch] = Kept()


def stores(
    device: cuda_device.Device, params: Array, places: Mapping[str, int], operands: Arrays, target: Array
) -> Iterator[tuple[_Launch, Arrays]]:
    """Launches that write a struct to `target`, with their arrays; `places` are the words of the pointers in it."""
    words = params.view(np.uint64)
    for first in range(0, words.size, _MOST_WORDS):
        own = {name: place - first for name, place in places.items() if first <= place < first + _MOST_WORDS}
        part = words[first : first + _MOST_WORDS]
        key = device, first, part.tobytes(), tuple(own.values())
        launch = _launches.get(key)
        if launch is None:
            launch = _launches[key] = _Launch(device, part, first, tuple(own.values()))
        yield launch, {OPERAND_PARAMS: target, **{name: operands[name] for name in own}}

"""The members of a block mask for backends: its store, on the host or a device, and the tiles that a kernel visits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.masks.on_device import Device, GetKernel, OnDevice, TileLists, list_tiles
from cuflash.masks.store import CANONICAL, HIDDEN, VISIBLE, Shape, Store, make_store, num_blocks
from cuflash.problem.mask_metadata import MaskMetadata

Array = Any
Window = tuple[int | None, int | None]

HOST = -1  # this stands for the host where others are numbers of devices
_serials = count()


class PreparedMask(MaskMetadata):
    """The base of `BlockMask` with the members that are for backends, not for users."""

    _home: int
    _release: Callable[[Array], Any] | None
    _host: Store | None
    _on_device: dict[int, OnDevice[tuple[Array, Array]]]
    _lists: dict[tuple[int, int, int, bool | None], OnDevice[TileLists]]
    _addresses: dict[Any, list[int]]
    _window: tuple[Window | None] | None  # None until it was looked for
    _density: float | None

    def _begin(
        self,
        shape: Shape,
        block_size: tuple[int, int],
        store: Store | OnDevice[tuple[Array, Array]],
        device: int,
        release: Callable[[Array], Any] | None,
    ) -> None:
        self.shape = shape
        self.block_size = block_size
        self.serial = next(_serials)
        self._home = device
        self._release = release
        self._host = store if isinstance(store, Store) else None
        self._on_device = {} if isinstance(store, Store) else {device: store}
        self._lists = {}
        self._addresses = {}
        self._window = None
        self._density = None

    def arrays(self, xp: Any) -> tuple[Array, Array]:
        """The slots and bits of `Store` as arrays of `xp` (numpy or cupy) on the current device, moved there once.

        Bit ``j % 32`` of word ``bits[slots[..., i // 64, j // 64], i % 64, j % 64 // 32]`` says whether (i, j) is
        visible; 0 beyond the array.
        """
        if xp is np:
            return self._store.slots, self._store.bits
        device = xp.cuda.runtime.getDevice()
        made = self._on_device.get(device)
        if made is None:
            slots, bits = self._store.slots, self._store.bits
            # Threads that come at once use the same arrays, or one's would be freed while others read.
            made = self._on_device.setdefault(device, OnDevice(xp, lambda: (xp.asarray(slots), xp.asarray(bits))))
        return made.get()

    def tile_lists(
        self, block_m: int, block_n: int, get_kernel: GetKernel, xp: Any, *, of_keys: bool | None = None
    ) -> TileLists:
        """The tiles of block_m x block_n elements that a kernel visits, listed once for each device and tile size.

        `get_kernel` is `cuda.device.get`. Rows of the kernel's fragments are queries or, with `of_keys`, keys; it is
        None where the kernel takes bits as the store has them. The call never waits for the device.
        """
        device = HOST if xp is np else xp.cuda.runtime.getDevice()
        key = (device, block_m, block_n, of_keys)
        lists = self._lists.get(key)
        if lists is None:
            slots, bits = self.arrays(xp)
            made = OnDevice(
                xp, lambda: list_tiles(xp, get_kernel, slots, bits, *self.shape[2:], block_m, block_n, of_keys)
            )
            lists = self._lists.setdefault(key, made)  # threads that come at once use the same lists
        return lists.get()

    def addresses(self, tiles: tuple[tuple[int, int, bool | None], ...], device: Device) -> list[int]:
        """Addresses of the store and of the lists for `tiles` on the current device, ready on this stream."""
        known = self._addresses.get((device, tiles))
        if known is None:
            xp = device.namespace
            number = HOST if xp is np else xp.cuda.runtime.getDevice()
            lists = [self._lists[(number,) + tile] for tile in tiles]
            arrays = [*self.arrays(xp), *(x for made in lists for x in made.get())]
            known = [device.pointer(x) for x in arrays]
            store = self._on_device.get(number)
            if all(made.is_complete for made in lists) and (store is None or store.is_complete):
                self._addresses[device, tiles] = known
        return known

    def tile_visible(self, b: int, h: int, i0: int, i1: int, j0: int, j1: int) -> bool | NDArray[np.bool_] | None:
        """The part of columns [j0, j1) that rows [i0, i1) see, in the call's `b` and `h`: None, True (all) or bools."""
        slots, table = self._store
        top, left = i0 // CANONICAL, j0 // CANONICAL
        covered = slots[
            b if slots.shape[0] > 1 else 0,
            h if slots.shape[1] > 1 else 0,
            top : num_blocks(i1),
            left : num_blocks(j1),
        ]
        states = set(covered.ravel().tolist())
        if states <= {HIDDEN}:
            return None
        if states == {VISIBLE}:
            return True
        rows = table[covered].transpose(0, 2, 1).reshape(-1, covered.shape[1])
        own_rows = np.ascontiguousarray(rows[i0 - top * CANONICAL : i1 - top * CANONICAL])
        bits = np.unpackbits(own_rows.view(np.uint8), axis=1, bitorder="little")
        visible = bits[:, j0 - left * CANONICAL : j1 - left * CANONICAL].view(np.bool_)
        if visible.all():
            return True
        return visible if visible.any() else None

    @property
    def _store(self) -> Store:
        """The store on the host, copied from the device when first needed."""
        if self._host is None:
            import cupy

            with cupy.cuda.Device(self._home):
                slots, bits = (cupy.asnumpy(x) for x in self._on_device[self._home].get())
            self._host = make_store(slots, [bits.reshape(len(bits), 2 * CANONICAL).view(np.uint64)])
        return self._host

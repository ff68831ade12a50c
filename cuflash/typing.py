"""Types of the public functions: an array of any library in, arrays of the same library out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar, overload

import numpy as np

__all__ = ["AnyArray", "ArrayT", "Backward", "Message", "OwnArray", "RankBackward"]


class _SpeaksDLPack(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


class _HasDLPackDevice(Protocol):
    def __dlpack_device__(self) -> tuple[Any, Any]: ...


class _HasCudaArrayInterface(Protocol):
    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]: ...


AnyArray = _SpeaksDLPack | _HasDLPackDevice | _HasCudaArrayInterface
# The results of a call have the type of its q. (In NumPy's types that includes q's dtype, whatever lse's or out's is.)
ArrayT = TypeVar("ArrayT", bound=AnyArray)


class OwnArray(_SpeaksDLPack, Protocol):
    """An array of NumPy or CuPy where only the running program knows of which: of caches, their steps, and ranks."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its axes."""
        ...

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """NumPy's dtype."""
        ...

    def __getitem__(self, index: object, /) -> OwnArray: ...

    def __setitem__(self, index: object, value: object, /) -> None: ...

    def tolist(self) -> Any:
        """Its elements as Python's numbers, in lists."""
        ...


# Message is what a rank hands to another one: an array, or several.
Message = OwnArray | Sequence["Message"]


class Backward(Protocol[ArrayT]):
    """The gradient function that `cuflash.attention_vjp` returns."""

    @overload
    def __call__(
        self,
        dout: ArrayT,
        dlse: AnyArray | None = None,
        *,
        out: Sequence[AnyArray | None] | None = None,
        grads: None = None,
    ) -> tuple[ArrayT, ...]: ...
    @overload
    def __call__(
        self,
        dout: ArrayT,
        dlse: AnyArray | None = None,
        *,
        out: Sequence[AnyArray | None] | None = None,
        grads: Sequence[str],
    ) -> tuple[ArrayT | None, ...]: ...


class RankBackward(Protocol[ArrayT]):
    """The gradient function that vjps over ranks return; every rank calls it as often as the others do."""

    @overload
    def __call__(self, dout: ArrayT, dlse: AnyArray | None = None, *, grads: None = None) -> tuple[ArrayT, ...]: ...
    @overload
    def __call__(
        self, dout: ArrayT, dlse: AnyArray | None = None, *, grads: Sequence[str]
    ) -> tuple[ArrayT | None, ...]: ...

"""Arrays of any library become NumPy or CuPy arrays, and results the caller's kind of array, without a copy.

`library_of` finds the `Library` of an argument, which says how its arrays are adopted and results released.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

Array = Any


class Library(NamedTuple):
    """The way of one library's arrays in, and of results out.

    ``adopt(argument's name, array)`` returns a NumPy or CuPy array over the same memory, and `release` returns the
    library's array for one of those.
    """

    name: str
    adopt: Callable[[str, Any], Array]
    release: Callable[[Array], Any]


def library_of(name: str, x: Any) -> Library:
    """The library of argument `name`; TypeError if `x` is no array that can be taken without a copy."""
    if isinstance(x, np.ndarray):
        refuse_masked(name, x)
        return _NUMPY
    root = type(x).__module__.partition(".")[0]
    if root == "cupy":
        return _CUPY
    if any(base.__module__ == "torch" for base in type(x).__mro__) and hasattr(x, "__dlpack__"):
        return _TORCH
    if root in ("jax", "jaxlib") and hasattr(x, "aval"):
        return _JAX
    if hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__"):
        release = _any_releaser(x)
        if release is not None:
            return Library(root, _adopt_any, release)
        # Results for a bare exporter are NumPy's or CuPy's, and go with it into further calls.
        return _BARE_ON_CPU if hasattr(x, "__dlpack__") and _device_type(x) in _ON_CPU else _BARE_ON_GPU
    inside = f" of {root}: use attention of cuflash.adapters.{root}, which has gradients" if root in _TRACED_BY else ""
    raise TypeError(
        f"{name}: expected an array of NumPy, CuPy or another library that speaks DLPack, "
        f"got {type(x).__name__}{inside}"
    )


# These libraries' own arrays record a graph, and speak no DLPack.
_TRACED_BY = ("autograd", "mygrad")


def are_own(arrays: Iterable[Any]) -> bool:
    """All arrays are NumPy's or CuPy's, which need no adoption."""
    for x in arrays:  # noqa: SIM110 - a generator costs twice as much, in every call
        if type(x).__module__ not in _OWN_MODULES:
            return False
    return True


def refuse_masked(name: str, x: Any) -> None:
    """Raise TypeError for a masked array of NumPy, because the elements that it hides would count."""
    # The class is found by name, as asking NumPy for it imports numpy.ma, which takes longer than a call.
    if any(base.__name__ == "MaskedArray" and base.__module__.startswith("numpy.ma") for base in type(x).__mro__):
        raise TypeError(
            f"{name}: expected an array that masks nothing, got {type(x).__name__} of numpy.ma, whose mask would be "
            "lost: pass its .data, and what attention is to hide as the option mask"
        )


def adopt_all(library: Library, names_and_arrays: dict[str, Any], reference: Array | None = None) -> dict[str, Array]:
    """The arguments as NumPy or CuPy arrays.

    All must be of `library`, and on the device of `reference` (an adopted array), or else of the first one.
    """
    adopted: dict[str, Array] = {}
    for name, x in names_and_arrays.items():
        its = library_of(name, x)
        if its.name != library.name:
            raise TypeError(f"{name}: expected an array of {library.name}, as the first one is, got one of {its.name}")
        adopted[name] = array = its.adopt(name, x)
        if reference is None:
            reference = array
        elif _device_id(array) != _device_id(reference):
            raise ValueError(
                f"{name}: expected an array on {device_name(reference)}, as the first one is, "
                f"got one on {device_name(array)}"
            )
    return adopted


def is_adopted(library: Library, x: Any, reference: Array) -> bool:
    """Whether `x` is already what `adopt_all` would make of it."""
    return library.adopt is _adopt_own and type(x) is type(reference) and _device_id(x) == _device_id(reference)


def _device_id(x: Array) -> int:
    return -1 if isinstance(x, np.ndarray) else x.data.device_id


def device_name(x: Array) -> str:
    """``"the CPU"`` or ``"GPU n"``."""
    return "the CPU" if isinstance(x, np.ndarray) else f"GPU {x.device.id}"


def namespace_of(x: Array) -> ModuleType:
    """The module numpy or cupy that an array belongs to."""
    return np if isinstance(x, np.ndarray) else _gpu_namespace()


@cache
def _gpu_namespace() -> ModuleType:
    # An import statement looks for the module in every call: 1.5 us.
    return import_module("cupy")


_HERE: AbstractContextManager[None] = contextlib.nullcontext()


def on_stream_of(library: Library, x: Array) -> AbstractContextManager[Any]:
    """Make the caller's current device and stream CuPy's while work on `x` is enqueued."""
    if isinstance(x, np.ndarray):
        return _HERE
    import cupy

    if library.name == "torch":
        return _torch_stream(x.device.id)
    if x.data.device_id == cupy.cuda.runtime.getDevice():
        return _HERE
    return cupy.cuda.Device(x.data.device_id)


@contextlib.contextmanager
def _torch_stream(device: int) -> Iterator[None]:
    import cupy
    import torch

    with cupy.cuda.Device(device):
        pointer = torch.cuda.current_stream(device).cuda_stream
        stream = cupy.cuda.ExternalStream(pointer, device) if pointer else cupy.cuda.Stream.null
        with stream:
            yield


def bfloat16() -> np.dtype:
    """NumPy's bfloat16, which the package ml_dtypes registers."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise TypeError('bfloat16 arrays need the package ml_dtypes: pip install "cuflash[bf16]"') from error
    return np.dtype(ml_dtypes.bfloat16)


def dtype_of(name: str) -> np.dtype:
    """NumPy's dtype of a name, bfloat16 included."""
    return bfloat16() if name == "bfloat16" else np.dtype(name)


def dtype_name(dtype: Any) -> str:
    """The name of a dtype of any library, or what stands for one; of other things their text."""
    try:
        return np.dtype(dtype).name
    except TypeError:  # torch's, whose names are NumPy's: "torch.float16"
        return str(dtype).rpartition(".")[2]


def _cupy(name: str) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            f'{name}: arrays on a GPU need CuPy: pip install "cuflash[cuda13]"; see python -m cuflash info'
        ) from error
    return cupy


# DLPack's device types: 1 CPU, 2 CUDA, 3 pinned host memory, 13 managed CUDA memory.
_ON_CPU, _ON_GPU = (1, 3), (2, 13)


def _device_type(x: Any) -> int:
    # NumPy takes arrays without this method, too, and so does this library.
    return int(x.__dlpack_device__()[0]) if hasattr(x, "__dlpack_device__") else 1


def _from_dlpack(name: str, x: Any) -> Array:
    device_type = _device_type(x)
    if device_type in _ON_CPU:
        try:
            array = np.from_dlpack(x)
        except RuntimeError as error:
            dtype = getattr(x, "dtype", error)
            raise TypeError(f"{name}: expected a dtype that NumPy takes from DLPack, got {dtype}") from error
        return array if array.flags.writeable or not _is_writable(x) else np.asarray(_Writable(array))
    if device_type in _ON_GPU:
        return _cupy(name).from_dlpack(x)
    raise ValueError(f"{name}: expected an array on the CPU or a CUDA GPU, got DLPack device type {device_type}")


def _is_writable(x: Any) -> bool:
    """Return True if an exporter's memory may be written though NumPy's array over it may not.

    NumPy takes memory for read-only if it comes by the protocol before 1.0, which has no word for that and is therefore
    not to be used for such memory.
    """
    if type(x).__module__.partition(".")[0] in IMMUTABLE:
        return False
    try:
        capsule = x.__dlpack__(max_version=(1, 0))
    except TypeError:  # the exporter does not know this keyword
        capsule = x.__dlpack__()
    return '"dltensor"' in repr(capsule)


class _Writable:
    """A NumPy array's memory, to be taken as memory that may be written."""

    def __init__(self, x: np.ndarray) -> None:
        self._owner = x
        self.__array_interface__ = {**x.__array_interface__, "data": (x.__array_interface__["data"][0], False)}


def _adopt_any(name: str, x: Any) -> Array:
    if hasattr(x, "__dlpack__"):
        return _from_dlpack(name, x)
    if x.__cuda_array_interface__.get("mask") is not None:
        raise TypeError(f"{name}: expected an array that masks nothing, got a __cuda_array_interface__ with a mask")
    return _cupy(name).asarray(x)


def _any_releaser(x: Any) -> Callable[[Array], Any] | None:
    """The way of results back into x's library, by its `from_dlpack` or Numba's view; None if it has none."""
    root = type(x).__module__.partition(".")[0]
    if root == "numba":
        from numba import cuda

        return cuda.as_cuda_array
    namespace = x.__array_namespace__() if hasattr(x, "__array_namespace__") else sys.modules.get(root)
    found: Callable[[Array], Any] | None = getattr(namespace, "from_dlpack", None)
    return found


def _identity(x: Array) -> Array:
    return x


def _adopt_own(name: str, x: Array) -> Array:
    return x


def _adopt_torch(name: str, x: Any) -> Array:
    import torch

    if x.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            f"{name}: expected a tensor that does not require grad, as cuflash records no graph: use the "
            "autograd.Function of cuflash.adapters.torch, as examples/autodiff/torch_autograd.py does, or pass "
            "tensor.detach()"
        )
    if x.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense torch tensor, got layout {x.layout}")
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: expected a tensor on the CPU or a CUDA GPU, got one on {x.device}")
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype == "float8_e4m3fn":  # which has no arrays of CuPy: as its codes
        x, dtype = x.view(torch.uint8), "uint8"
    if dtype != "bfloat16" and not hasattr(np, dtype):
        raise TypeError(f"{name}: expected a dtype of NumPy or bfloat16, got {dtype}")
    x = x.detach()
    if x.device.type == "cuda":
        return _wrap_torch(_cupy(name), x, dtype_of(dtype))
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(bfloat16())
    return x.resolve_conj().resolve_neg().numpy()


def _wrap_torch(cupy: Any, x: Any, dtype: np.dtype) -> Array:
    """A CuPy array over a tensor's memory.

    DLPack does not serve: its exporter makes CuPy's current stream wait for torch's, which breaks a graph's capture.
    """
    strides = tuple(n * dtype.itemsize for n in x.stride())
    extent = sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True) if n > 0) + dtype.itemsize
    memory = cupy.cuda.UnownedMemory(x.data_ptr(), extent if x.numel() else 0, x, x.device.index)
    return cupy.ndarray(tuple(x.shape), dtype, cupy.cuda.MemoryPointer(memory, 0), strides=strides)


def _release_torch(x: Array) -> Any:
    import torch

    if x.dtype.name == "bfloat16":
        return _release_torch(x.view(np.int16)).view(torch.bfloat16)
    if isinstance(x, np.ndarray):
        return torch.from_numpy(x)
    # The stream -1 says that there is nothing to wait for, as the work is on torch's current stream.
    return torch.utils.dlpack.from_dlpack(x.__dlpack__(stream=-1))


def _adopt_jax(name: str, x: Any) -> Array:
    import jax

    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{name}: expected a concrete JAX array, got a tracer: inside jit, grad or vmap use attention of "
            "cuflash.adapters.jax"
        )
    return np.asarray(x) if x.__dlpack_device__()[0] == 1 else _from_dlpack(name, x)


def _release_jax(x: Array) -> Any:
    import jax

    if x.dtype.name == "bfloat16":
        bits = jax.dlpack.from_dlpack(x.view(np.int16))
        return jax.lax.bitcast_convert_type(bits, jax.numpy.bfloat16)
    return jax.dlpack.from_dlpack(x)


_NUMPY = Library("numpy", _adopt_own, _identity)
_CUPY = Library("cupy", _adopt_own, _identity)
_BARE_ON_CPU = Library("numpy", _adopt_any, _identity)
_BARE_ON_GPU = Library("cupy", _adopt_any, _identity)
_OWN_MODULES = frozenset((_NUMPY.name, _CUPY.name))
# Libraries whose arrays nobody may write, although DLPack would let us.
IMMUTABLE = frozenset(("jax", "jaxlib", "tensorflow"))
_TORCH = Library("torch", _adopt_torch, _release_torch)
_JAX = Library("jax", _adopt_jax, _release_jax)

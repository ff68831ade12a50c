"""Matrix products by cuBLASLt, which CuPy does not reach: what follows a product can be done in its kernel.

cuBLASLt names several kernels for a product, its guess of the fastest first; which is the fastest, timing tells.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = Any

# Numbers of the C interface (cublasLt.h)
COMPUTE_32F = 68
TRANSPOSE_A, TRANSPOSE_B, EPILOGUE, BIAS_POINTER, AUX_POINTER, AUX_STRIDE = 3, 4, 7, 8, 11, 12  # of a product
FAST_SUMS = 25  # of a product of 8 bits: with fewer bits than float32
E4M3, E5M2 = 28, 29  # types of 8 bits, which arrays here have as uint8 and int8
BATCH_COUNT, BATCH_STRIDE = 5, 6  # of a matrix's layout
WORKSPACE_BYTES, ALIGNMENTS = 1, (5, 6, 7, 8)  # of what is asked for: alignments of A, B, C and D
NOTHING, BIAS, GELU_AUX_BIAS = 1, 4, 164  # what follows the product

WORKSPACE = 64 << 20  # bytes
WORKSPACES = (WORKSPACE, 0)  # that are allowed when kernels are looked for: each has its own that it thinks the fastest
MOST_ALIGNMENT = 256  # bytes; what cuBLASLt takes for granted if it is not told
CANDIDATES = 8  # that are asked for
ROUNDS, TURN = 3, 4.0  # of the search for the fastest; a candidate's turn in a round in milliseconds
MUCH_SLOWER = 1.3  # what takes so many times as long as the fastest has one turn


class Choice(ctypes.Structure):
    """A kernel for a product, as cuBLASLt describes it."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Matrix(NamedTuple):
    """A row-major matrix or stack of them, as the column-major library sees it."""

    kind: int
    rows: int
    columns: int
    stride: int
    transposed: bool
    stack: int  # matrices, and the distance between them
    stack_stride: int
    alignment: int


@dataclass
class Plan:
    """Everything about a product but the addresses."""

    product: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ...]
    choice: Choice


class Products:
    """``a @ b`` on the current stream, in the operands' dtype with float32 sums.

    Parameters
    ----------
    search : bool
        Time cuBLASLt's candidates at the first product of a shape. Without, runs repeat to the bit in every process.
    """

    def __init__(self, search: bool) -> None:
        import cupy
        from cuda.pathfinder import load_nvidia_dynamic_lib

        self._cupy = cupy
        runtime = cupy.cuda.runtime
        self._types = {"bfloat16": runtime.CUDA_R_16BF, "float32": runtime.CUDA_R_32F, "uint8": E4M3, "int8": E5M2}
        self._search = search
        self._library = ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
        self._handle = self._made("cublasLtCreate")
        self._workspace = cupy.empty(WORKSPACE, np.uint8)
        self._factors = {
            1.0: np.array([1, 0, 1], np.float32)
        }  # of the product and of what is there; read from the host
        self._plans: dict[Any, Plan] = {}

    def __call__(
        self,
        a: Array,
        b: Array,
        out: Array | None = None,
        added: Array | None = None,
        bias: Array | None = None,
        before_gelu: Array | None = None,
        scale: float = 1.0,
    ) -> Array:
        """Multiply matrices or stacks; one of the last two axes of an operand is contiguous, and the last of `out`.

        The product is multiplied by `scale`; `added` has the result's shape and may be `out`. `bias` is added to each
        row; with `before_gelu`, which takes that sum, GELU by tanh follows.
        """
        if out is None:
            out = self._cupy.empty((*a.shape[:-1], b.shape[-1]), a.dtype)
        # The library is column-major: it computes out^T = b^T a^T.
        operands = (b, a, out if added is None else added, out)
        epilogue = NOTHING if bias is None else BIAS if before_gelu is None else GELU_AUX_BIAS
        key = (*map(self._signature, operands), epilogue, added is None)
        plan = self._plans.get(key)
        new = plan is None
        if plan is None:
            matrices = tuple(map(self._matrix, operands))
            plan = self._plans[key] = self._plan(matrices, epilogue)
        if bias is not None:
            self._set("MatmulDesc", plan.product, BIAS_POINTER, ctypes.c_uint64(bias.data.ptr))
        if before_gelu is not None:
            self._set("MatmulDesc", plan.product, AUX_POINTER, ctypes.c_uint64(before_gelu.data.ptr))
            self._set("MatmulDesc", plan.product, AUX_STRIDE, ctypes.c_int64(before_gelu.shape[-1]))
        in_place = added is not None and added.data.ptr == out.data.ptr  # so that it cannot be repeated
        if new and self._search and not in_place:
            alignments = [self._alignment(x) for x in operands]
            plan.choice = self._fastest(plan, alignments, operands, added is not None)
        self._run(plan, plan.choice, operands, added is not None, scale)
        return out

    @staticmethod
    def _alignment(x: Array) -> int:
        address = x.data.ptr
        return int(min(MOST_ALIGNMENT, address & -address))

    def _signature(self, x: Array) -> tuple[Any, ...]:
        """All that a plan depends on, as it is found quickest: a step of the baseline has 960 products."""
        return x.dtype.num, x.shape, x.strides, self._alignment(x)

    def _matrix(self, x: Array) -> Matrix:
        rows, columns = (stride // x.itemsize for stride in x.strides[-2:])
        transposed = columns != 1
        height, width = x.shape[-2:] if transposed else x.shape[:-3:-1]
        stack, stack_stride = (x.shape[0], x.strides[0] // x.itemsize) if x.ndim == 3 else (1, 0)
        kind, stride = self._types[x.dtype.name], columns if transposed else rows
        return Matrix(kind, height, width, stride, transposed, stack, stack_stride, self._alignment(x))

    def _plan(self, matrices: Sequence[Matrix], epilogue: int) -> Plan:
        left, right, _, result = matrices
        kind = self._types["float32"]
        product = self._made("cublasLtMatmulDescCreate", ctypes.c_int(COMPUTE_32F), ctypes.c_int(kind))
        settings = ((TRANSPOSE_A, left.transposed), (TRANSPOSE_B, right.transposed), (EPILOGUE, epilogue))
        for attribute, value in settings:
            self._set("MatmulDesc", product, attribute, ctypes.c_int32(value))
        if left.kind == right.kind == E4M3:
            self._set("MatmulDesc", product, FAST_SUMS, ctypes.c_int8(1))
        layouts = tuple(map(self._layout, matrices))
        alignments = [matrix.alignment for matrix in matrices]
        if epilogue == GELU_AUX_BIAS:  # its stride decides which kernels there are
            self._set("MatmulDesc", product, AUX_STRIDE, ctypes.c_int64(result.rows))
        return Plan(product, layouts, self._candidates(product, layouts, alignments, WORKSPACE)[0])

    def _layout(self, matrix: Matrix) -> ctypes.c_void_p:
        sizes = (ctypes.c_uint64(matrix.rows), ctypes.c_uint64(matrix.columns), ctypes.c_int64(matrix.stride))
        layout = self._made("cublasLtMatrixLayoutCreate", ctypes.c_int(matrix.kind), *sizes)
        if matrix.stack > 1:
            self._set("MatrixLayout", layout, BATCH_COUNT, ctypes.c_int32(matrix.stack))
            self._set("MatrixLayout", layout, BATCH_STRIDE, ctypes.c_int64(matrix.stack_stride))
        return layout

    def _candidates(
        self, product: ctypes.c_void_p, layouts: tuple[ctypes.c_void_p, ...], alignments: list[int], workspace: int
    ) -> list[Choice]:
        wanted = self._made("cublasLtMatmulPreferenceCreate")
        self._set("MatmulPreference", wanted, WORKSPACE_BYTES, ctypes.c_uint64(workspace))
        for attribute, alignment in zip(ALIGNMENTS, alignments, strict=True):
            self._set("MatmulPreference", wanted, attribute, ctypes.c_uint32(alignment))
        found, choices = ctypes.c_int(), (Choice * CANDIDATES)()
        count = ctypes.c_int(CANDIDATES)
        arguments = (self._handle, product, *layouts, wanted, count, choices, ctypes.byref(found))
        self._call("cublasLtMatmulAlgoGetHeuristic", *arguments)
        self._call("cublasLtMatmulPreferenceDestroy", wanted)
        return [choices[i] for i in range(found.value)]

    def _fastest(self, plan: Plan, alignments: list[int], operands: tuple[Array, ...], add: bool) -> Choice:
        """By turns, long enough for the card to become as hot as in a step: then others are the fastest."""
        found: dict[bytes, Choice] = {}
        for workspace in WORKSPACES:
            with suppress(RuntimeError):  # there may be none without
                choices = self._candidates(plan.product, plan.layouts, alignments, workspace)
                found |= {bytes(choice.algorithm): choice for choice in choices}
        candidates = list(found.values())
        times = [self._milliseconds(plan, choice, operands, add, 1) for choice in candidates]
        times = [min(t, self._milliseconds(plan, c, operands, add, 1)) for t, c in zip(times, candidates, strict=True)]
        limit, repeats = MUCH_SLOWER * min(times), max(1, round(TURN / min(times)))
        close = [choice for time, choice in zip(times, candidates, strict=True) if time <= limit]
        sums = [0.0] * len(close)
        for _ in range(ROUNDS):
            sums = [t + self._milliseconds(plan, c, operands, add, repeats) for t, c in zip(sums, close, strict=True)]
        return close[int(np.argmin(sums))]

    def _milliseconds(self, plan: Plan, choice: Choice, operands: tuple[Array, ...], add: bool, repeats: int) -> float:
        """Return the mean time of some runs of a product; infinite if the library took the kernel back."""
        start, end = (self._cupy.cuda.Event() for _ in range(2))
        start.record()
        try:
            for _ in range(repeats):
                self._run(plan, choice, operands, add)
        except RuntimeError:
            return float("inf")
        end.record()
        end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(start, end)) / repeats

    def _run(self, plan: Plan, choice: Choice, operands: tuple[Array, ...], add: bool, scale: float = 1.0) -> None:
        factors = self._factors.setdefault(scale, np.array([scale, 0, 1], np.float32))
        alpha = factors.ctypes.data
        beta = alpha + (2 if add else 1) * factors.itemsize
        left, right, added, result = (ctypes.c_void_p(x.data.ptr) for x in operands)
        of_left, of_right, of_added, of_result = plan.layouts
        self._call(
            *("cublasLtMatmul", self._handle, plan.product, ctypes.c_void_p(alpha), left, of_left, right, of_right),
            *(ctypes.c_void_p(beta), added, of_added, result, of_result, ctypes.byref(choice)),
            *(ctypes.c_void_p(self._workspace.data.ptr), ctypes.c_size_t(WORKSPACE)),
            ctypes.c_void_p(self._cupy.cuda.get_current_stream().ptr),
        )

    def _made(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        thing = ctypes.c_void_p()
        self._call(function, ctypes.byref(thing), *arguments)
        return thing

    def _set(self, what: str, thing: ctypes.c_void_p, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._call(f"cublasLt{what}SetAttribute", thing, ctypes.c_int(attribute), ctypes.byref(value), size)

    def _call(self, function: str, *arguments: Any) -> None:
        call: Callable[..., int] = getattr(self._library, function)
        status = call(*arguments)
        if status:
            raise RuntimeError(f"{function} failed with status {status}")

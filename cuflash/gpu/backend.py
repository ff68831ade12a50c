"""The GPU path: each pass is given to the first family of kernels that takes the problem."""

from __future__ import annotations

from cuflash.cuda import device as cuda_device
from cuflash.gpu import convert, own_rules
from cuflash.gpu import portable as gpu_portable
from cuflash.gpu import sm80 as gpu_sm80
from cuflash.gpu import sm90 as gpu_sm90
from cuflash.gpu import split as gpu_split
from cuflash.gpu.append import append
from cuflash.gpu.launch import Work
from cuflash.gpu.pages import Unpaged, fits, with_first_keys
from cuflash.gpu.params import Arrays
from cuflash.gpu.parts import merge_parts, sum_parts
from cuflash.gpu.replay import Recording
from cuflash.plan.config import HEAD_DIM_CLASSES
from cuflash.plan.split import of_half
from cuflash.problem.attention_problem import Array, AttentionProblem
from cuflash.problem.operands import Operands

__all__ = ["append", "backward", "forward", "merge_parts", "sum_parts"]  # what every backend has


def _by_halves(work: Work) -> bool:
    """Write out in two runs, for half of v's columns each; False where no kernel takes them."""
    half = of_half(work.problem).head_dim_v
    halves = work.of_values(slice(half)), work.of_values(slice(half, None))
    return all(gpu_split.forward(own) or gpu_sm80.forward(own) for own in halves)


_FORWARD = (gpu_sm90.forward, gpu_split.forward, gpu_sm80.forward, _by_halves, gpu_portable.forward)
# With splits of one size a row's bits depend on nothing that another sequence could change.
_FORWARD_ALIKE = (gpu_sm80.forward_alike, gpu_portable.forward)
# These read pages where they lie.
_PAGED_FORWARD = (gpu_sm80.paged_forward, gpu_portable.paged_forward)
_BACKWARD = (gpu_sm90.backward, gpu_split.backward, gpu_sm80.backward, gpu_sm80.wide_backward)


def forward(problem: AttentionProblem, operands: Operands, out: Array, lse: Array | None) -> Recording:
    """Write the result of a problem, and lse if it is wanted; return the recorded launches."""
    _check_head_dims(problem)
    results = {"out": out} if lse is None else {"out": out, "lse": lse}
    work = Work(problem, operands, results, cuda_device.device_of(out))
    if lse is None:
        work.arrays["lse"] = work.empty(problem.lse_shape, problem.accum_dtype)
    if not problem.is_mixed:
        _forward(work)
    elif not (_may_write_wide(problem) and gpu_sm90.forward(work)):
        own = convert.widened(work)
        _forward(own)
        convert.narrow(work, {"out": own.arrays["out"]}, {"out": out})
    work.recording.end()
    return work.recording


def _check_head_dims(problem: AttentionProblem) -> None:
    widest = HEAD_DIM_CLASSES[-1]
    for name, size in (("head_dim of q", problem.head_dim), ("head_dim_v of v", problem.head_dim_v)):
        if size > widest:
            raise NotImplementedError(f"{name}: expected 1 to {widest} on a GPU, as no kernel is wider, got {size}")


def _forward(work: Work) -> None:
    """Run the first family that takes a problem whose arrays have one dtype."""
    problem = work.problem
    if problem.pages is not None and not fits(work):
        with_first_keys(work)
        next(filter(None, (family(work) for family in _PAGED_FORWARD)))
        return
    if problem.pages is not None:
        Unpaged(work)
    families = _FORWARD if problem.split_size is None else _FORWARD_ALIKE
    next(filter(None, (family(work) for family in families)))


def _may_write_wide(problem: AttentionProblem) -> bool:
    """A kernel on 16-bit inputs may write results of the accumulation's dtype."""
    has_rows = problem.pages is None and problem.split_size is None and not problem.has_fp8_keys
    return has_rows and problem.out_dtype == problem.accum_dtype


def backward(
    problem: AttentionProblem,
    operands: Operands,
    dout: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    grads: dict[str, Array],
    adds: bool = False,
) -> Recording | None:
    """Write the wanted gradients of a problem; return the recorded launches, None if they cannot be repeated.

    Those of q, k and v have the inputs' dtype, or all the accumulation's; with `adds` they are added to what their
    arrays hold.
    """
    _check_head_dims(problem)
    given = {"dout": dout, "out": out, "lse": lse}
    of_lse = {} if dlse is None else {"dlse": dlse}
    results = {f"d{name}": x for name, x in grads.items()}
    given_work = work = Work(problem, operands, given, cuda_device.device_of(out), of_lse | results)
    of_inputs = {name: x for name, x in grads.items() if name in ("q", "k", "v")}
    is_wide = adds or any(x.dtype.name != problem.dtype for x in of_inputs.values())
    work.arrays["delta"] = work.empty(problem.lse_shape, problem.accum_dtype)
    rest = None
    if is_wide and not problem.is_mixed and "bias" not in grads:  # whose kernels write the bias's own dtype
        rest = gpu_sm90.backward(work, work.arrays | of_lse, grads, adds)
    own = grads
    if rest is None and (is_wide or problem.is_mixed):
        delta = work.arrays["delta"]
        work = convert.widened(work, is_backward=True)
        work.arrays["delta"] = delta
        own = convert.wide_results(given_work, grads)
        if adds:
            own = own | {name: given_work.empty(x.shape, x.dtype) for name, x in of_inputs.items()}
    unpaged = None
    if rest is None:
        unpaged = None if problem.pages is None else Unpaged(work)
        targets = own if unpaged is None else unpaged.gradients(own)
        of_operands = {name: x for name, x in targets.items() if name in problem.operand_grads}
        rest = _by_families(work, of_lse, {name: x for name, x in targets.items() if name not in of_operands})
    else:
        of_operands = {name: rest.pop(name) for name in problem.operand_grads if name in rest}
    gpu_portable.gradients(work, gpu_sm80.of_bias(work, gpu_sm80.of_queries(work, rest)))
    own_rules.gradients(work, of_operands)
    if unpaged is not None:
        unpaged.scatter()
    if adds and own is not grads:
        for name, x in of_inputs.items():
            x += own[name]
            own[name] = x
    convert.narrow(given_work, own, results)
    work.recording.end()
    return None if adds and own is not grads else work.recording


def _by_families(work: Work, of_lse: Arrays, grads: Arrays) -> Arrays:
    """Write what the first family writes that takes the problem; return the other gradients."""
    for family in _BACKWARD:
        rest = family(work, work.arrays | of_lse, grads)
        if rest is not None:
            return rest
    gpu_portable.delta(work, work.arrays | of_lse)
    return grads

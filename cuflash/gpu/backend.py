"""The GPU path: each pass is given to the first family of kernels that takes the problem."""

from __future__ import annotations

from dataclasses import replace

from cuflash.cuda import device as cuda_device
from cuflash.gpu import own_rules
from cuflash.gpu import portable as gpu_portable
from cuflash.gpu import sm80 as gpu_sm80
from cuflash.gpu import sm90 as gpu_sm90
from cuflash.gpu import split as gpu_split
from cuflash.gpu.launch import Work
from cuflash.gpu.pages import Unpaged, fits, with_first_keys
from cuflash.gpu.params import Arrays
from cuflash.gpu.parts import merge_parts, sum_parts
from cuflash.gpu.replay import Recording
from cuflash.plan.split import of_half
from cuflash.problem.attention_problem import Array, AttentionProblem
from cuflash.problem.operands import Operands


def _by_halves(work: Work) -> bool:
    """Write out in two runs, for half of v's columns each; False where no kernel takes them."""
    half = of_half(work.problem).head_dim_v
    halves = work.of_values(slice(half)), work.of_values(slice(half, None))
    return all(gpu_split.forward(own) or gpu_sm80.forward(own) for own in halves)


__all__ = ["backward", "forward", "merge_parts", "sum_parts"]  # what every backend has

_FORWARD = (gpu_sm90.forward, gpu_split.forward, gpu_sm80.forward, _by_halves, gpu_portable.forward)
# With splits of one size a row's bits depend on nothing that another sequence could change.
_FORWARD_ALIKE = (gpu_sm80.forward_alike, gpu_portable.forward)
_BACKWARD = (gpu_sm90.backward, gpu_split.backward, gpu_sm80.backward, gpu_sm80.wide_backward)


def forward(problem: AttentionProblem, operands: Operands, out: Array, lse: Array | None) -> Recording:
    """Write the result of a problem, and lse if it is wanted; return the recorded launches."""
    results = {"out": out} if lse is None else {"out": out, "lse": lse}
    work = Work(problem, operands, results, cuda_device.device_of(out))
    if lse is None:
        work.arrays["lse"] = work.empty(problem.lse_shape, problem.accum_dtype)
    is_own = out.dtype.name != problem.dtype
    reads_pages = problem.pages is not None and not fits(work)
    if problem.pages is not None and not reads_pages:
        Unpaged(work)
    if is_own and (reads_pages or problem.split_size is not None or not gpu_sm90.forward(work)):
        return forward(*_in_accum_dtype(problem, operands), out, lse)
    if reads_pages:
        gpu_portable.paged_forward(with_first_keys(work))
    elif not is_own:
        families = _FORWARD if problem.split_size is None else _FORWARD_ALIKE
        next(filter(None, (family(work) for family in families)))
    work.recording.end()
    return work.recording


def _in_accum_dtype(problem: AttentionProblem, operands: Operands) -> tuple[AttentionProblem, Operands]:
    """The same problem on inputs of the accumulation's dtype, whose kernels write results of that dtype."""
    wide = {name: getattr(operands, name).astype(problem.accum_dtype) for name in ("q", "k", "v")}
    return replace(problem, dtype=problem.accum_dtype), operands._replace(**wide)


def backward(
    problem: AttentionProblem,
    operands: Operands,
    dout: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    grads: dict[str, Array],
    adds: bool = False,
) -> Recording:
    """Write the wanted gradients of a problem; return the recorded launches.

    Those of q, k and v have the inputs' dtype, or all the accumulation's; with `adds` they are added to what their
    arrays hold.
    """
    given = {"dout": dout, "out": out, "lse": lse}
    of_lse = {} if dlse is None else {"dlse": dlse}
    results = {f"d{name}": x for name, x in grads.items()}
    work = Work(problem, operands, given, cuda_device.device_of(out), of_lse | results)
    work.arrays["delta"] = work.empty(problem.lse_shape, problem.accum_dtype)
    of_operands = {name: x for name, x in grads.items() if name in problem.operand_grads}
    grads = {name: x for name, x in grads.items() if name not in of_operands}
    is_own = adds or any(grads[name].dtype.name != problem.dtype for name in ("q", "k", "v") if name in grads)
    unpaged = None if problem.pages is None else Unpaged(work)
    given_grads = grads | of_operands
    if unpaged is not None:
        grads = unpaged.gradients(grads)
    if is_own:
        rest = gpu_sm90.backward(work, work.arrays | of_lse, grads, adds)
        if rest is None:
            return _backward_in_accum_dtype(problem, operands, dout, out, lse, dlse, given_grads, adds)
    else:
        rest = _by_families(work, of_lse, grads)
    gpu_portable.gradients(work, gpu_sm80.of_bias(work, gpu_sm80.of_queries(work, rest)))
    own_rules.gradients(work, of_operands)
    if unpaged is not None:
        unpaged.scatter()
    work.recording.end()
    return work.recording


def _by_families(work: Work, of_lse: Arrays, grads: Arrays) -> Arrays:
    """Write what the first family writes that takes the problem; return the other gradients."""
    for family in _BACKWARD:
        rest = family(work, work.arrays | of_lse, grads)
        if rest is not None:
            return rest
    gpu_portable.delta(work, work.arrays | of_lse)
    return grads


def _backward_in_accum_dtype(
    problem: AttentionProblem,
    operands: Operands,
    dout: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    grads: Arrays,
    adds: bool,
) -> Recording:
    """`backward` by the kernels of inputs of the accumulation's dtype."""
    problem, operands = _in_accum_dtype(problem, operands)
    dout, out = dout.astype(problem.dtype), out.astype(problem.dtype)
    if not adds:
        return backward(problem, operands, dout, out, lse, dlse, grads)
    shares = {name: cuda_device.device_of(x).namespace.empty(x.shape, x.dtype) for name, x in grads.items()}
    recording = backward(problem, operands, dout, out, lse, dlse, shares)
    for name, share in shares.items():
        if name in ("q", "k", "v"):
            grads[name] += share
        else:
            grads[name][...] = share
    return recording

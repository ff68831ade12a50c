"""The GPU path: each pass is given to the first family of kernels that takes the problem."""

from __future__ import annotations

from cuflash.cuda import device as cuda_device
from cuflash.gpu import convert
from cuflash.gpu import portable as gpu_portable
from cuflash.gpu import sm80 as gpu_sm80
from cuflash.gpu import sm90 as gpu_sm90
from cuflash.gpu import split as gpu_split
from cuflash.gpu.launch import Work
from cuflash.gpu.replay import Recording
from cuflash.plan.split import of_half
from cuflash.problem.attention_problem import Array, AttentionProblem
from cuflash.problem.operands import Operands


def _by_halves(work: Work) -> bool:
    """Write out in two runs, for half of v's columns each; False where no kernel takes them."""
    half = of_half(work.problem).head_dim_v
    halves = work.of_values(slice(half)), work.of_values(slice(half, None))
    return all(gpu_split.forward(own) or gpu_sm80.forward(own) for own in halves)


_FORWARD = (gpu_sm90.forward, gpu_split.forward, gpu_sm80.forward, _by_halves, gpu_portable.forward)
_BACKWARD = (gpu_sm90.backward, gpu_split.backward, gpu_sm80.backward, gpu_sm80.wide_backward)


def forward(problem: AttentionProblem, operands: Operands, out: Array, lse: Array | None) -> Recording:
    """Write the result of a problem, and lse if it is wanted; return the recorded launches."""
    results = {"out": out} if lse is None else {"out": out, "lse": lse}
    work = Work(problem, operands, results, cuda_device.device_of(out))
    if lse is None:
        work.arrays["lse"] = work.empty(problem.lse_shape, problem.accum_dtype)
    own = convert.widened(work) if problem.is_mixed else work
    wide_out = own.arrays["out"]
    next(filter(None, (family(own) for family in _FORWARD)))
    convert.narrow(work, {"out": wide_out}, {"out": out})
    work.recording.end()
    return work.recording


def backward(
    problem: AttentionProblem,
    operands: Operands,
    dout: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    grads: dict[str, Array],
) -> Recording:
    """Write the wanted gradients of a problem; return the recorded launches."""
    given = {"dout": dout, "out": out, "lse": lse}
    of_lse = {} if dlse is None else {"dlse": dlse}
    results = {f"d{name}": x for name, x in grads.items()}
    whole = work = Work(problem, operands, given, cuda_device.device_of(out), of_lse | results)
    wide_grads = grads
    if problem.is_mixed:
        work = convert.widened(whole, is_backward=True)
        grads = wide_grads = convert.wide_results(whole, grads)
    work.arrays["delta"] = work.empty(problem.lse_shape, problem.accum_dtype)
    for family in _BACKWARD:
        rest = family(work, work.arrays | of_lse, grads)
        if rest is not None:
            break
    else:
        gpu_portable.delta(work, work.arrays | of_lse)
        rest = grads
    gpu_portable.gradients(work, gpu_sm80.of_bias(work, gpu_sm80.of_queries(work, rest)))
    convert.narrow(whole, wide_grads, results)
    work.recording.end()
    return work.recording

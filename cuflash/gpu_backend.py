"""The GPU path: the first family that takes a problem."""

from cuflash import kernels, launch, launch_sm80, launch_sm90, launch_split
from cuflash.launch import Work
from cuflash.plan_split import of_half
from cuflash.problem import Array, AttentionProblem, Operands
from cuflash.recording import Recording


def _by_halves(work: Work) -> bool:
    """Write out by halves of its columns; False where no kernel takes these."""
    half = of_half(work.problem).head_dim_v
    parts = work.of_values(slice(half)), work.of_values(slice(half, None))
    return all(launch_split.forward(part) or launch_sm80.forward(part) for part in parts)


_FORWARD = (launch_sm90.forward, launch_split.forward, launch_sm80.forward, _by_halves, launch.forward)
_BACKWARD = (launch_sm90.backward, launch_split.backward, launch_sm80.backward, launch_sm80.wide_backward)


def forward(problem: AttentionProblem, operands: Operands, out: Array, lse: Array | None) -> Recording:
    """Write the result of a problem, and lse if it is wanted; return how."""
    results = {"out": out} if lse is None else {"out": out, "lse": lse}
    work = Work(problem, operands, results, kernels.device_of(out))
    if lse is None:
        work.arrays["lse"] = work.empty(problem.lse_shape, problem.accum_dtype)
    next(filter(None, (family(work) for family in _FORWARD)))
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
    """Write the wanted gradients of a problem; return how."""
    given = {"dout": dout, "out": out, "lse": lse}
    of_lse = {} if dlse is None else {"dlse": dlse}
    results = {f"d{name}": x for name, x in grads.items()}
    work = Work(problem, operands, given, kernels.device_of(out), of_lse | results)
    work.arrays["delta"] = work.empty(problem.lse_shape, problem.accum_dtype)
    for family in _BACKWARD:
        rest = family(work, work.arrays | of_lse, grads)
        if rest is not None:
            break
    else:
        launch.delta(work, work.arrays | of_lse)
        rest = grads
    launch.gradients(work, launch_sm80.of_bias(work, launch_sm80.of_queries(work, rest)))
    work.recording.end()
    return work.recording

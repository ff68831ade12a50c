"""The GPU path gives each pass to the first family of kernels that takes the problem."""

from __future__ import annotations

from cuflash.cuda import device as cuda_device
from cuflash.gpu import ahead, convert, own_rules, rule_blocks
from cuflash.gpu import decode as gpu_decode
from cuflash.gpu import portable as gpu_portable
from cuflash.gpu import sm80 as gpu_sm80
from cuflash.gpu import sm90 as gpu_sm90
from cuflash.gpu import sm90_fp8 as gpu_sm90_fp8
from cuflash.gpu import split as gpu_split
from cuflash.gpu.append import append
from cuflash.gpu.launch import Work
from cuflash.gpu.pages import Unpaged, fits, with_first_keys
from cuflash.gpu.params import Arrays
from cuflash.gpu.parts import merge_parts, sum_parts
from cuflash.gpu.replay import Recording
from cuflash.plan.config import of_half
from cuflash.problem.attention_problem import Array, AttentionProblem, operand_name
from cuflash.problem.operands import Operands

__all__ = ["append", "backward", "expect_gradients", "forward", "merge_parts", "sum_parts"]  # what every backend has


def _by_halves(work: Work) -> bool:
    """Write out in two runs, for half of v's columns each; False where no kernel takes them."""
    half = of_half(work.problem).head_dim_v
    halves = work.of_values(slice(half)), work.of_values(slice(half, None))
    return all(gpu_split.forward(own) or gpu_sm80.forward(own) for own in halves)


_FORWARD = (
    gpu_decode.sooner_forward,
    gpu_sm90.forward,
    gpu_split.forward,
    gpu_decode.forward,
    gpu_sm80.forward,
    _by_halves,
    gpu_portable.forward,
)
# Splits of one size ask for these, with which a row's bits depend on nothing that another sequence could change.
_FORWARD_ALIKE = (gpu_sm80.forward_alike, gpu_portable.forward)
# These forward passes read pages where they lie.
_PAGED_FORWARD = (gpu_decode.forward, gpu_sm80.paged_forward, gpu_portable.paged_forward)
_BACKWARD = (
    gpu_sm80.backward_alone,
    gpu_sm90.backward,
    gpu_split.backward,
    gpu_sm80.backward,
    gpu_sm80.wide_backward,
)


def forward(problem: AttentionProblem, operands: Operands, out: Array, lse: Array | None) -> Recording:
    """Write the result of a problem, and lse if it is wanted; return the recorded launches."""
    results = {"out": out} if lse is None else {"out": out, "lse": lse}
    work = Work(problem, operands, results, cuda_device.device_of(out))
    if lse is None:
        work.arrays["lse"] = work.empty(problem.lse_shape, problem.accum_dtype)
    if not problem.is_mixed:
        ahead.forward(work, run_forward)
        rule_blocks.find(work)
        run_forward(work)
    elif not (
        (problem.has_fp8_keys and gpu_decode.forward(work))
        or gpu_sm90_fp8.forward(work)
        or gpu_sm90.codes_forward(work)
        or gpu_sm80.fp8_forward(work)
        or (_may_write_wide(problem) and gpu_sm90.forward(work))
    ):
        own = convert.widened(work)
        run_forward(own)
        convert.narrow(work, {"out": own.arrays["out"]}, {"out": out})
    work.recording.end()
    return work.recording


def run_forward(work: Work) -> None:
    """Run the first family that takes a problem whose arrays have one dtype."""
    problem = work.problem
    is_paged = problem.pages is not None
    if is_paged and problem.split_size is None and (gpu_decode.sooner_forward(work) or gpu_sm90.paged_forward(work)):
        return
    if is_paged and not fits(work):
        with_first_keys(work)
        next(filter(None, (family(work) for family in _PAGED_FORWARD)))
        return
    if is_paged:
        Unpaged(work)
    families = _FORWARD if problem.split_size is None else _FORWARD_ALIKE
    next(filter(None, (family(work) for family in families)))


def _may_write_wide(problem: AttentionProblem) -> bool:
    """Return True if a kernel on 16-bit inputs may write results of the accumulation's dtype."""
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
) -> Recording | None:
    """Write the wanted gradients of a problem; return the recorded launches, None if they cannot be repeated.

    The gradients of q, k and v have the inputs' dtype, or all have the accumulation's.
    """
    of_lse = {} if dlse is None else {"dlse": dlse}
    residuals = {"dout": dout, "out": out, "lse": lse}
    results = {f"d{name}": x for name, x in grads.items()}
    work = Work(problem, operands, residuals, cuda_device.device_of(out), of_lse | results)
    work.arrays["delta"] = work.empty(problem.lse_shape, problem.accum_dtype)
    of_inputs = {name: x for name, x in grads.items() if name in ("q", "k", "v")}
    is_wide = any(x.dtype.name != problem.dtype for x in of_inputs.values())
    if is_wide and _backward_wide(work, of_lse, grads):
        return _ended(work)
    if not (is_wide or problem.is_mixed):
        ahead.backward(work, of_lse, grads, run_backward)
        rule_blocks.find(work)
        run_backward(work, of_lse, grads)
        return _ended(work)
    own = convert.widened(work, is_backward=True)
    found = convert.wide_results(work, grads)
    run_backward(own, of_lse, found)
    convert.narrow(work, found, results)
    return _ended(work)


def expect_gradients(problem: AttentionProblem, operands: Operands, out: Array, lse: Array) -> None:
    """Let other threads compile the kernels for the gradients of a forward pass; nothing is ever raised."""
    work = Work(problem.unsplit, operands, {"dout": out, "out": out, "lse": lse}, cuda_device.device_of(out))
    work.arrays["delta"] = lse
    inputs = operands._asdict() | {operand_name(n): x for n, x in enumerate(operands.of_rules)}
    ahead.backward(work, {}, {name: inputs[name] for name in problem.grad_names}, run_backward)


def _ended(work: Work) -> Recording:
    work.recording.end()
    return work.recording


def _backward_wide(work: Work, of_lse: Arrays, grads: Arrays) -> bool:
    """Write gradients of 16-bit inputs that are not rounded; False where no kernel on 16 bits does."""
    if work.problem.is_mixed or "bias" in grads:  # the kernels write the bias's own dtype
        return False
    rest = gpu_sm90.backward(work, work.arrays | of_lse, grads)
    if rest is None:
        return False
    _write_others(work, rest)
    return True


def run_backward(work: Work, of_lse: Arrays, grads: Arrays) -> None:
    """Write the gradients of a problem whose arrays have one dtype."""
    unpaged = None if work.problem.pages is None else Unpaged(work)
    targets = grads if unpaged is None else unpaged.gradients(grads)
    _write_others(work, _by_families(work, of_lse, targets))
    if unpaged is not None:
        unpaged.scatter()


def _write_others(work: Work, grads: Arrays) -> None:
    """Write the gradients that the families left."""
    of_operands = {name: grads[name] for name in work.problem.operand_grads if name in grads}
    others = {name: x for name, x in grads.items() if name not in of_operands}
    gpu_portable.gradients(work, gpu_sm80.of_bias(work, gpu_sm80.of_queries(work, others)))
    own_rules.gradients(work, of_operands)


def _by_families(work: Work, of_lse: Arrays, grads: Arrays) -> Arrays:
    """Write what the first family writes that takes the problem; return the other gradients."""
    for family in _BACKWARD:
        rest = family(work, work.arrays | of_lse, grads)
        if rest is not None:
            return rest
    gpu_portable.delta(work, work.arrays | of_lse)
    return grads

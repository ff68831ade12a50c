"""The files and functions of cuda_src in which kernels stand, by the kernels' entries (`KernelConfig.entry`)."""

from __future__ import annotations

# The files of kernels that several kinds of products share, by the end of the kernels' names.
_SM80 = {"forward": "sm80/forward.cuh keys=sm80/own_keys.cuh", "bias": "around/bias_range.cuh gradient=sm80/bias.cuh"}
# A value names a file, and what stands for the names that the file and its headers include: how a kernel multiplies
# (`products`), where its keys lie (`keys`), and so on.
_FILES = {
    "forward": "portable/forward.cu keys=portable/own_rows.cuh",
    "paged_forward": "portable/forward.cu keys=portable/paged_rows.cuh",
    "backward_dq": "portable/backward_dq",
    "backward_dkv": "portable/backward_dkv",
    "backward_dk": "portable/backward_dkv",
    "backward_dv": "portable/backward_dkv",
    "backward_bias": "around/bias_range.cuh gradient=portable/bias_gradient.cuh",
    "backward_operands": "portable/backward_operands.cuh terms=portable/operand_terms.cuh",
    "operand_maxima": "portable/backward_operands.cuh terms=portable/operand_maxima.cuh",
    "operand_words": "portable/backward_operands.cuh terms=portable/operand_words.cuh",
    "forward_sm80": "sm80/forward.cuh keys=sm80/own_keys.cuh products=sm80/half_tile.cuh",
    "paged_forward_sm80": "sm80/forward.cuh keys=sm80/paged_keys.cuh products=sm80/half_tile.cuh",
    "fp8_forward_sm80": "sm80/forward.cuh keys=sm80/own_codes.cuh products=sm80/codes_tile.cuh",
    "paged_fp8_forward_sm80": "sm80/forward.cuh keys=sm80/paged_codes.cuh products=sm80/codes_tile.cuh",
    "decode": "decode/decode",
    "ordered_dq": "sm80/gradients.cuh products=sm80/half_tile.cuh",
    "bias_sm80": "around/bias_range.cuh gradient=sm80/bias.cuh products=sm80/half_tile.cuh",
    "backward_sm80": "sm80/backward",
    "backward_sm80_rows": "sm80/backward_rows",
    "backward_sm80_dq": "sm80/backward_rows",
    **{
        f"{family}_{name}": f"{_SM80.get(name, 'sm80/gradients.cuh')} products={tile}.cuh"
        for family, tile in (("wide", "sm80/wide_tile"), ("parts", "split/sm80_tile"))
        for name in ("forward", "dq", "dkv", "dk", "dv", "bias")
    },
    "forward_sm90": "sm90/forward/forward",
    "fp8_forward_sm90": "sm90/fp8/forward",
    "backward_sm90": "sm90/backward/backward",
    "backward_sm90_wide": "sm90/backward/wide",
    "backward_sm90_rows": "sm90/backward/rows",
    "backward_sm90_dq": "sm90/backward/rows",
    "split_rows": "split/rows",
    "split_channels": "split/channels",
    "split_forward": "split/sm90_forward",
    **{f"split_{name}": "split/sm90_backward" for name in ("dq", "dkv", "dk", "dv")},
}
# The function in these files is not named like the entry, because several entries share it.
_FUNCTIONS = {
    "portable/forward.cu": "forward",
    "portable/backward_dkv": "backward_dkv",
    "portable/backward_operands.cuh": "backward_operands",
    "around/bias_range.cuh": "backward_bias",
    "sm80/forward.cuh": "forward_sm80",
    "sm80/gradients.cuh": "gradients_sm80",
    "split/sm90_backward": "split_backward",
}

# A kernel whose thread blocks stay with keys computes the gradients that the end of its name tells.
_KEY_RESULTS = {"dkv": ("dk", "dv"), "dk": ("dk",), "dv": ("dv",)}


def file_of(entry: str) -> str:
    """Paths of the files in cuda_src in which a kernel stands, as `cuda.source.source_of` takes them."""
    return _FILES[entry]


def function_of(entry: str) -> str:
    """Name of the ``extern "C"`` function of a kernel."""
    return _FUNCTIONS.get(file_of(entry).split(" ")[0], entry)


def key_results(entry: str) -> tuple[str, ...]:
    """Names of the results dk and dv that a kernel computes; its thread blocks stay with keys if it computes any."""
    return _KEY_RESULTS.get(entry.rpartition("_")[2], ())

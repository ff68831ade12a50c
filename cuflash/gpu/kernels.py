"""The source texts of attention kernels have a configuration's constants, shared numbers and parameter structs.

`cuda.source` joins them with the files of cuda_src, `cuda.device` compiles and loads the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from cuflash.cuda import device as cuda_device
from cuflash.cuda.source import Constants
from cuflash.cuda.source import source_of as source_of_files
from cuflash.gpu.params import OPERAND_PARAMS, operand_struct, struct_of
from cuflash.gpu.split_layout import OPERANDS, ROW_ALIGNMENT, TENSOR
from cuflash.kept import kept
from cuflash.masks import store
from cuflash.plan.config import KernelConfig
from cuflash.plan.entries import file_of, function_of
from cuflash.plan.portable.kernels import SIDE
from cuflash.rules.form import NO_RULES, Rules
from cuflash.rules.to_cuda import EMPTY, HEADER, functions_of

# Host and kernels share these numbers, which are neither a tile's nor the hardware's.
_SHARED: Constants = {**store.CONSTANTS, "SIDE": SIDE, "ROW_ALIGNMENT": ROW_ALIGNMENT}
_HEADERS = {**TENSOR.headers, **OPERANDS.headers}
_NO_CONSTANTS = ("entry", "rules")


@kept
def headers_of(rules: Rules) -> dict[str, str]:
    """Return the generated headers of a kernel with these rules."""
    headers = {**_HEADERS, **struct_of(rules).headers}
    if rules == NO_RULES:
        return headers | {HEADER: EMPTY}
    where, apart = "p", operand_struct(rules)
    if apart is not None:  # it is declared within the parameter struct, which has a pointer to it
        where = f"*p.{OPERAND_PARAMS}"
        members, layout = (apart.headers[f"{apart.name}.{part}"] for part in ("members", "layout"))
        layout = layout.replace(apart.name, f"AttentionParams::{apart.name}")
        headers["AttentionParams.members"] = (
            f"  struct {apart.name} {{\n{members}\n  }};\n{headers['AttentionParams.members']}"
        )
        headers["AttentionParams.layout"] += f"\n{layout}"
    return headers | {HEADER: f"DEVICE const auto& operands() const {{ return {where}; }}\n{functions_of(rules)}"}


def constants_of(config: KernelConfig) -> Constants:
    """Return every field of a configuration but its entry and its rules."""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.name not in _NO_CONSTANTS}


def source_of(config: KernelConfig) -> str:
    """Return the source text of a configuration's kernel."""
    return text_of(file_of(config.entry), constants_of(config), config.rules)


def text_of(paths: str, constants: Constants, rules: Rules = NO_RULES) -> str:
    """Return the text of files of cuda_src that know AttentionParams; `paths` are as in `cuda.source.source_of`."""
    return source_of_files(paths, {**_SHARED, **constants}, headers_of(rules))


def load(
    paths: str,
    function: str,
    constants: Constants,
    device: cuda_device.Device,
    smem_bytes: int = 0,
    rules: Rules = NO_RULES,
    generated: Mapping[str, str] | None = None,
) -> cuda_device.LoadedKernel:
    """Load a compiled function of such files (see `text_of`), once for each device.

    `generated`, as in `cuda.source.source_of`, stands in place of the headers of files that know AttentionParams.
    """
    headers = headers_of(rules) if generated is None else generated
    return cuda_device.get(paths, function, {**_SHARED, **constants}, device, smem_bytes, headers)


def load_kernel(
    config: KernelConfig, entry: str, device: cuda_device.Device, smem_bytes: int
) -> cuda_device.LoadedKernel:
    """Load the compiled kernel of a configuration; several entries may share one configuration."""
    return load(file_of(entry), function_of(entry), constants_of(config), device, smem_bytes, config.rules)


def spilled_bytes(config: KernelConfig, entry: str, device: cuda_device.Device, smem_bytes: int) -> int:
    """Return the bytes of registers that such a kernel spills to local memory, as `cuda.device.spilled_bytes` does."""
    constants = {**_SHARED, **constants_of(config)}
    text = cuda_device.Text(file_of(entry), function_of(entry), constants, headers_of(config.rules))
    return cuda_device.spilled_bytes(text, device, smem_bytes, config.local_bytes, config.words)

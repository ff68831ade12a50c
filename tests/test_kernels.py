"""The kernels' source text and its compilation, without a GPU: every row of the table on every architecture."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from compiling import ARCHITECTURES, HOPPER, assert_compiles_well, compiled, needs_compiler, source, tables_of

import cuflash
from cuflash import (
    kernels,
    launch,
    launch_sm90,
    launch_split,
    params,
    plan,
    plan_sm80,
    plan_sm80_backward,
    plan_sm90,
    plan_sm90_backward,
    plan_split,
    plan_wide,
)
from cuflash.plan import FLAGS

pytest.importorskip("cupy", reason='no CuPy: pip install "cuflash[cuda13]"')

SMALL_ENTRIES = ("delta", "merge_parts", "merge_rows", "reduce_sink", "reduce_slopes", "reduce_bias")


@pytest.mark.parametrize(
    ("file", "name", "number"),
    [
        ("params.cuh", "WARP", plan_sm80.WARP),
        ("params.cuh", "WARP", launch_sm90._ROW_BLOCKS),  # a lane asks for each
        ("tile.cuh", "SIDE", plan._SIDE),
        ("score_fragment.cuh", "MASK_WORD", plan_split._MASK_WORD),
        ("sm90/schedule.cuh", "WARPGROUP", plan_sm90.WARPGROUP),
        ("sm90/products.cuh", "ROWS_OF_WARPGROUP", plan_sm90.ROWS_OF_WARPGROUP),
        ("sm90/products.cuh", "ROWS_OF_WARP", plan_sm90.ROWS_OF_WARP),
        ("sm90/products.cuh", "PANEL", plan_sm90_backward._PANEL),
        ("sm90/split_layout.cuh", "SPLIT_PANEL", launch_split._PANEL),
        ("sm90/split_layout.cuh", "ROW_ALIGNMENT", launch_split._ROW_ALIGNMENT),
    ],
)
def test_numbers_that_stand_in_headers_too(file: str, name: str, number: int) -> None:
    """What a header is written for is no constant of a configuration; the host has the same number."""
    assert re.findall(rf"constexpr int {name} = (\d+)", kernels.inlined(file))[0] == str(number)


@needs_compiler
@pytest.mark.features(of=lambda params: params.items())
@pytest.mark.parametrize(
    ("arch", "entry"),
    [(arch, entry) for arch in ARCHITECTURES for entry in sorted({config.entry for config in tables_of(arch)})],
)
def test_rows_compile_without_spills(arch: str, entry: str) -> None:
    """Those of the tables that architectures share; `compiled` says which of them where."""
    for config in compiled(arch, [config for config in tables_of(arch) if config.entry == entry]):
        assert_compiles_well(arch, config)


@pytest.mark.whole
def test_every_row_is_compiled_for_hopper_and_for_its_oldest_architecture() -> None:
    assert compiled(HOPPER, tables_of(HOPPER)) == tables_of(HOPPER)
    done = {config for arch in ARCHITECTURES for config in compiled(arch, tables_of(arch))}
    assert done == {config for arch in ARCHITECTURES for config in tables_of(arch)}


@needs_compiler
@pytest.mark.parametrize("entry", SMALL_ENTRIES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_small_kernels_compile(dtype: str, entry: str) -> None:
    config = plan.config_of("forward", dtype, None, 0, 64, ())
    text = kernels.source_of("reduce", launch.constants_of_sums(config))
    report = kernels.compile_for("sm_75", text, entry)
    assert report.spill_bytes == 0
    assert not report.warnings


def test_sources_are_self_contained() -> None:
    for config, _ in plan.table(plan.SMALLEST_SMEM):
        text = source(config)
        assert '#include "' not in text
        assert text.count("struct AttentionParams {") == 1
        assert "sizeof(AttentionParams)" in text


def test_every_constant_is_emitted() -> None:
    config = plan.config_of("forward", "float32", None, 0, 64, ("has_window",))
    text = source(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "entry":
            continue
        if isinstance(value, bool):
            assert f"constexpr bool {field.name.upper()} = {str(value).lower()};" in text
        elif isinstance(value, int):
            assert f"constexpr int {field.name.upper()} = {value};" in text
        else:
            assert f" = {value};" in text


def test_an_edited_header_is_a_new_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    config = plan.config_of("forward", "float32", None, 0, 64, ())
    before = source(config)
    read = kernels._read
    monkeypatch.setattr(kernels, "_read", lambda path: read(path) + ("// edited\n" if path == "mask.cuh" else ""))
    assert source(config) != before


def test_lines_of_messages_are_those_of_the_files() -> None:
    """Behind every #line the text goes on as the named file does from that line on."""
    text = kernels.inlined("forward.cu")
    root = Path(kernels.__file__).parent.parent / "cuda_src"
    lines = text.splitlines()
    seen = 0
    for number, line in enumerate(lines):
        if line.startswith("#line"):
            _, first, name = line.split()
            file_lines = (root / name.strip('"').removeprefix("cuda_src/")).read_text().splitlines()
            following = lines[number + 1]
            original = file_lines[int(first) - 1] if int(first) <= len(file_lines) else ""
            if not following.startswith("#line") and not original.startswith("#include"):
                assert following == original, line
                seen += 1
    assert seen > 5


@needs_compiler
def test_compile_errors_name_file_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    config = plan.config_of("forward", "float32", None, 0, 64, ())
    read = kernels._read
    broken = "int broken = undefined_name;\n"
    monkeypatch.setattr(kernels, "_read", lambda path: (broken if path == "mask.cuh" else "") + read(path))
    with pytest.raises(RuntimeError, match=r"cuda_src/mask\.cuh\(1\): error"):
        kernels.compile_for("sm_90", source(config), "forward")


@needs_compiler
def test_two_processes_compile_at_once() -> None:
    code = (
        "from cuflash import kernels, plan\n"
        "config = plan.config_of('forward', 'float32', None, 0, 64, ())\n"
        "print(len(kernels.compile_for('sm_90', kernels.source_of('forward', config), 'forward').cubin))\n"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    sizes = [int(run.communicate(timeout=120)[0]) for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert sizes[0] == sizes[1] > 0


def test_the_parameter_struct_has_no_gaps_that_differ() -> None:
    """Offsets are asserted on the device; here, that the launch code can address every pointer as a whole word."""
    assert params.PARAMS.fields is not None
    assert params.PARAMS.itemsize % 8 == 0
    for name in (*params.TENSORS, *params.SCORE_TENSORS, *params.POINTERS, "dropout_key"):
        assert params.PARAMS.fields[name][1] % 8 == 0
    assert params.PARAMS.itemsize <= 4096, "what a launch may pass by value"


def test_warpgroups_ask_for_no_more_registers_than_their_block_has() -> None:
    """One that waited for more (setmaxnreg.inc) would wait for ever: a block has those that it was launched with."""
    tables = (plan_sm90.table, plan_sm90_backward.table, plan_split.table, plan_split.gradient_table)
    configs = [config for table in tables for config, _ in table()]
    assert configs
    for config in configs:
        of_thread = min(65536 // config.threads // 8 * 8, 255)  # as ptxas gives them to kernels with launch bounds
        left = of_thread * config.threads // plan_sm90.WARPGROUP - config.producer_registers
        if of_dq := getattr(config, "dq_registers", 0):  # the one for dv is told, that for dk has what is left
            of_dk = left - config.consumer_registers - of_dq
            assert of_thread <= of_dk <= config.consumer_registers and of_dk % 8 == 0, config
        else:
            assert config.consumers * config.consumer_registers <= left, config


@pytest.mark.parametrize(
    ("arch", "kin"), [("sm_88", "sm_89"), ("sm_101", "sm_103"), ("sm_122", "sm_121"), ("sm_130", "sm_86")]
)
def test_a_gpu_that_no_table_names_has_kernels(arch: str, kin: str) -> None:
    """Those of the newest of its major version, or in the least shared memory since Ampere."""
    capability, limit = plan.capability_of(arch), plan.smem_limit(arch)
    assert limit == plan.smem_limit(kin)
    problem = cuflash.problem.AttentionProblem(1, 8, 8, 1, 1, 64, 64, "float32")
    assert plan_wide.backward(problem, True, capability, limit)
    for table in (plan_sm80.table, plan_sm80_backward.table, plan_wide.table):
        assert all(config.smem_bytes <= limit for config, _ in table(capability, limit))


@pytest.mark.parametrize("head_dim", [1, 32, 33, 64, 65, 128, 129, 256])
def test_classes_hold_their_head_dims(head_dim: int) -> None:
    wide = plan.head_dim_class(head_dim)
    assert wide >= head_dim
    assert all(c < head_dim or c >= wide for c in plan.HEAD_DIM_CLASSES)


def test_the_table_names_every_dtype_and_flag() -> None:
    configs = [config for config, _ in plan.table(plan.smem_limit("sm_90"))]
    assert {config.element for config in configs} == {"__half", "__nv_bfloat16", "float", "double"}
    for flag in FLAGS:
        assert {getattr(config, flag) for config in configs} == {False, True}
    assert np.all([config.smem_bytes <= plan.smem_limit("sm_90") for config in configs])

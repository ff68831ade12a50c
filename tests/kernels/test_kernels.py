"""The kernels' source text compiles without a GPU, every row of the table on every architecture."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import rows
import tiers
from compiling import (
    ARCHITECTURES,
    HOPPER,
    PAGED,
    assert_compiles_well,
    compiled,
    needs_compiler,
    reading_pages,
    sampled,
    share_of,
    source,
    tables_of,
)

import cuflash
from cuflash import hardware
from cuflash.cuda import compile as cuda_compile
from cuflash.cuda import source as cuda_source
from cuflash.gpu import kernels as gpu_kernels
from cuflash.gpu import key_splits
from cuflash.gpu import params as gpu_params
from cuflash.gpu import portable as gpu_portable
from cuflash.plan import config as plan_config
from cuflash.plan.config import FLAGS
from cuflash.plan.listing import families as listing
from cuflash.plan.listing import sm90 as sm90_listing
from cuflash.plan.portable import kernels as plan_portable
from cuflash.plan.sm80 import wide as sm80_wide
from cuflash.problem.attention_problem import AttentionProblem

pytest.importorskip("cupy", reason='no CuPy: pip install "cuflash[cuda13]"')

SMALL_ENTRIES = ("delta", "reduce_sink", "reduce_slopes", "reduce_bias")


def plain_config(dtype: str = "float32", flags: tuple[str, ...] = ()) -> plan_portable.PortableConfig:
    return plan_portable.plan(listing.problem_of(dtype, 64, 64, flags), "forward")[0]


@needs_compiler
@pytest.mark.features(of=lambda params: params.items())
@pytest.mark.parametrize(
    ("arch", "entry"),
    [(arch, entry) for arch in ARCHITECTURES for entry in sorted({config.entry for config in tables_of(arch)})],
)
def test_rows_compile_without_spills(arch: str, entry: str) -> None:
    """Rows of the tables that architectures share compile where `compiled` says."""
    for config in compiled(arch, [config for config in tables_of(arch) if config.entry == entry]):
        assert_compiles_well(arch, config)


@needs_compiler
@pytest.mark.whole
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_rows_compile_without_spills_where_they_read_pages(arch: str) -> None:
    """Reading pages takes registers of its own, so that these are compiled beside the rows' own kernels."""
    configs = [config for config in tables_of(arch) if config.entry in PAGED]
    for config in share_of(arch, configs):
        assert_compiles_well(arch, reading_pages(config))


@pytest.mark.whole
def test_every_row_is_compiled_for_hopper_or_for_its_oldest_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole suite has a sample of these, and the profile ``long`` has all."""
    monkeypatch.setattr(tiers, "has_every_case", lambda: True)
    assert compiled(HOPPER, tables_of(HOPPER)) == tables_of(HOPPER)
    done = {config for arch in ARCHITECTURES for config in compiled(arch, tables_of(arch))}
    assert done == {config for arch in ARCHITECTURES for config in tables_of(arch)}


def test_a_sample_has_every_tile_and_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "has_every_case", lambda: False)
    for table in (tables_of(HOPPER), [config for config, _ in listing.kernels(sm90_listing.of_hopper())]):
        chosen = sampled(table)
        assert len(chosen) < 2 / 3 * len(table)
        for what in (rows.options_of, lambda c: [(c.entry, c.head_dim, c.head_dim_v, c.tile)]):
            shown = [set(chain.from_iterable(map(what, configs))) for configs in (chosen, table)]
            assert shown[0] == shown[1]


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_small_kernels_compile(dtype: str) -> None:
    """They are one text, of which the report is the sum."""
    config = plain_config(dtype)
    text = gpu_kernels.text_of("around/reduce", gpu_portable.constants_of_sums(config))
    choices = key_splits.AT_ONCE["float64" if dtype == "float64" else "float32"]
    of_merge = [gpu_kernels.text_of("around/merge_splits", key_splits.constants_of(config, each)) for each in choices]
    reports = [cuda_compile.compile_for("sm_75", each, "small") for each in (text, *of_merge)]
    assert all(f".text.{entry}".encode() in reports[0].cubin for entry in SMALL_ENTRIES)
    assert [report.spill_bytes for report in reports] == [0, 0, 0]
    assert not any(report.warnings for report in reports)


def test_sources_are_self_contained() -> None:
    for config, _ in listing.kernels(listing.of_portable(hardware.SMALLEST_SMEM)):
        text = source(config)
        assert '#include "' not in text
        assert text.count("struct AttentionParams {") == 1
        assert "sizeof(AttentionParams)" in text


def test_every_constant_is_emitted() -> None:
    config = plain_config(flags=("has_window",))
    text = source(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        # The rules' text is a header, which test_rules_on_kernels.py checks.
        if field.name in ("entry", "rules"):
            continue
        if isinstance(value, bool):
            assert f"constexpr bool {field.name.upper()} = {str(value).lower()};" in text
        elif isinstance(value, int):
            assert f"constexpr int {field.name.upper()} = {value};" in text
        else:
            assert f" = {value};" in text


def test_an_edited_header_is_a_new_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    config = plain_config()
    before = source(config)
    read = cuda_source._read
    monkeypatch.setattr(
        cuda_source, "_read", lambda path: read(path) + ("// edited\n" if path == "rules/mask.cuh" else "")
    )
    assert source(config) != before


def test_lines_of_messages_are_those_of_the_files() -> None:
    """The text goes on behind every #line as the named file does from that line on."""
    text = source(plain_config())
    root = Path(cuflash.__file__).parent.parent / "cuda_src"
    lines = text.splitlines()
    seen = 0
    for number, line in enumerate(lines):
        if line.startswith("#line"):
            _, first, name = line.split()
            if not name.startswith('"cuda_src/'):
                continue  # a generated header
            file_lines = (root / name.strip('"').removeprefix("cuda_src/")).read_text().splitlines()
            following = lines[number + 1]
            original = file_lines[int(first) - 1] if int(first) <= len(file_lines) else ""
            if not following.startswith("#line") and not original.lstrip().startswith("#include"):
                assert following == original, line
                seen += 1
    assert seen > 5


@needs_compiler
def test_compile_errors_name_file_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    config = plain_config()
    read = cuda_source._read
    broken = "int broken = undefined_name;\n"
    monkeypatch.setattr(cuda_source, "_read", lambda path: (broken if path == "rules/mask.cuh" else "") + read(path))
    with pytest.raises(RuntimeError, match=r"cuda_src/rules/mask\.cuh\(1\): error"):
        cuda_compile.compile_for("sm_90", source(config), "forward")


@needs_compiler
def test_two_processes_compile_at_once() -> None:
    code = (
        "from cuflash.cuda.compile import compile_for\n"
        "from cuflash.gpu.kernels import source_of\n"
        "from cuflash.plan.listing.families import problem_of\n"
        "from cuflash.plan.portable.kernels import plan\n"
        "config = plan(problem_of('float32', 64, 64, ()), 'forward')[0]\n"
        "print(len(compile_for('sm_90', source_of(config), 'forward').cubin))\n"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    sizes = [int(run.communicate(timeout=120)[0]) for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert sizes[0] == sizes[1] > 0


def test_the_parameter_struct_has_no_gaps_that_differ() -> None:
    """The launch code can address every pointer as a whole word; offsets are asserted on the device."""
    assert gpu_params.PARAMS.dtype.itemsize % 8 == 0
    for name in (*gpu_params.TENSORS, *gpu_params.SCORE_TENSORS, *gpu_params.POINTERS, "dropout_key"):
        assert gpu_params.PARAMS.offset(name) % 8 == 0
    assert gpu_params.PARAMS.dtype.itemsize <= 4096, "what a launch may pass by value"


def test_warpgroups_ask_for_no_more_registers_than_their_block_has() -> None:
    """A warpgroup that asked for more (setmaxnreg.inc) would wait for ever, as a block has those of its launch."""
    configs = [config for config, _ in listing.kernels(sm90_listing.of_hopper())]
    assert configs
    for config in configs:
        of_thread = min(65536 // config.threads // 8 * 8, 255)  # as ptxas gives them to kernels with launch bounds
        left = of_thread * config.threads // hardware.WARPGROUP - config.producer_registers
        if of_dq := getattr(config, "dq_registers", 0):  # the one for dv is told, that for dk has what is left
            of_dk = left - config.consumer_registers - of_dq
            assert of_thread <= of_dk <= config.consumer_registers and of_dk % 8 == 0, config
        else:
            assert config.consumers * config.consumer_registers <= left, config


@pytest.mark.parametrize(
    ("arch", "kin"), [("sm_88", "sm_89"), ("sm_101", "sm_103"), ("sm_122", "sm_121"), ("sm_130", "sm_86")]
)
def test_a_gpu_that_no_table_names_has_kernels(arch: str, kin: str) -> None:
    """An unknown GPU has the kernels of the newest of its major version, or of the least shared memory since Ampere."""
    capability, limit = hardware.capability_of(arch), hardware.smem_limit(arch)
    assert limit == hardware.smem_limit(kin)
    problem = AttentionProblem(1, 8, 8, 1, 1, 64, 64, "float32")
    assert sm80_wide.backward(problem, True, capability, limit)
    passes = listing.of_any_gpu(capability, limit)
    assert all(config.smem_bytes <= limit for config, _ in listing.kernels(passes))


@pytest.mark.parametrize("head_dim", [1, 32, 33, 64, 65, 128, 129, 256])
def test_classes_hold_their_head_dims(head_dim: int) -> None:
    wide = plan_config.head_dim_class(head_dim)
    assert wide >= head_dim
    assert all(c < head_dim or c >= wide for c in plan_config.HEAD_DIM_CLASSES)


def test_the_table_names_every_dtype_and_flag() -> None:
    configs = [config for config, _ in listing.kernels(listing.of_portable(hardware.smem_limit("sm_90")))]
    assert {config.element for config in configs} == {"__half", "__nv_bfloat16", "float", "double"}
    for flag in FLAGS:
        # Only parts of a longer problem have places, and test_partial.py compiles their kernels. Codes are converted
        # before a portable kernel runs.
        is_false = flag in ("has_place", "has_fp8")
        assert {getattr(config, flag) for config in configs} == ({False} if is_false else {False, True})
    assert np.all([config.smem_bytes <= hardware.smem_limit("sm_90") for config in configs])

"""The minimal kernels and their tiles in NumPy, against the reference."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Case
from cpu_device import device

from cuflash import reference
from cuflash.examples.minimal import __main__ as command
from cuflash.examples.minimal import kernels, tiles

RNG = np.random.default_rng(0)
# (seqlen_q, seqlen_k, head_dim): whole and ragged tiles, rows that see nothing, one of everything.
SHAPES = [(64, 64, 64), (33, 70, 128), (70, 33, 5), (1, 200, 80), (1, 1, 1), (47, 0, 8), (0, 5, 8)]
RUNS = [
    pytest.param("numpy", marks=pytest.mark.skipif(not device.available(), reason=device.NO_COMPILER)),
    pytest.param("cupy", marks=pytest.mark.gpu),
]


def draw(batch: int, heads: int, shape: tuple[int, int, int]) -> tuple[Any, ...]:
    """dout, q, k and v (batch, heads, seqlen, head_dim)."""
    seqlen_q, seqlen_k, head_dim = shape
    return tuple(RNG.standard_normal((batch, heads, n, head_dim)) for n in (seqlen_q, seqlen_q, seqlen_k, seqlen_k))


def expected(causal: bool, dout: Any, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """Return the reference's out, lse, dq, dk and dv."""
    dout, q, k, v = (x.swapaxes(1, 2) for x in (dout, q, k, v))
    out, lse = reference.attention(q, k, v, causal=causal)
    gradients = reference.attention_backward(dout, q, k, v, causal=causal)
    return (out.swapaxes(1, 2), lse, *(gradients[name].swapaxes(1, 2) for name in ("q", "k", "v")))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles(shape: tuple[int, int, int], causal: bool) -> None:
    arrays = draw(1, 1, shape)
    dout, q, k, v = (x[0, 0] for x in arrays)
    out, lse = tiles.forward(q, k, v, causal)
    found = (out, lse, *tiles.backward(dout, q, k, v, out, lse, causal))
    for ours, exact in zip(found, expected(causal, *arrays), strict=True):
        np.testing.assert_allclose(ours, exact[0, 0], rtol=1e-12, atol=1e-12)
    if 0 not in shape and np.isfinite(lse).all():
        np.testing.assert_allclose(tiles.naive(q, k, v, causal), out, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("xp", RUNS)
@pytest.mark.parametrize("dtype", kernels.ELEMENTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels(shape: tuple[int, int, int], causal: bool, dtype: str, xp: str) -> None:
    namespace = pytest.importorskip(xp)
    by_head = [x.astype(dtype) for x in draw(2, 3, shape)]
    dout, q, k, v = (namespace.asarray(x) for x in by_head)
    out, lse = kernels.forward(q, k, v, causal)
    results = out, lse, *kernels.backward(dout, q, k, v, out, lse, causal)
    assert lse.dtype == np.float32 and all(x.dtype == dtype for x in (out, *results[2:]))
    out, lse, *gradients = results if xp == "numpy" else (namespace.asnumpy(x) for x in results)
    out, *gradients, dout, q, k, v = (x.swapaxes(1, 2) for x in (out, *gradients, *by_head))
    case = Case(q, k, v, dout, options={"causal": causal})
    case.assert_forward(out, lse)
    case.assert_gradients(dict(zip("qkv", gradients, strict=True)), out, lse)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda q, k, v: (q.astype(np.float64), k, v), TypeError, "q: expected float32 or float16.* got float64"),
        (lambda q, k, v: (q, k.astype(np.float16), v), TypeError, "k: expected .* all the same, got float16"),
        (lambda q, k, v: (q, k, v[:, :, :3]), ValueError, r"v: expected \(batch, heads.* got \(1, 2, 3, 8\)"),
        (lambda q, k, v: (q[0], k[0], v[0]), ValueError, r"q: expected \(batch, heads"),
        (lambda q, k, v: (np.repeat(q, 17, -1), np.repeat(k, 17, -1), np.repeat(v, 17, -1)), ValueError, "1 to 128"),
    ],
)
def test_what_the_kernels_do_not_take(change: Any, error: type[Exception], words: str) -> None:
    q, k, v = (np.ones((1, 2, 4, 8), np.float32) for _ in range(3))
    with pytest.raises(error, match=words):
        kernels.forward(*change(q, k, v))


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It says what is missing where the kernels cannot run, and shows the tiles all the same."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(kernels, "FOLDER", tmp_path / "examples" / "minimal")
    monkeypatch.setattr(kernels, "_cpu_module", kernels._cpu_module.__wrapped__)
    assert command.main() == 2
    printed = capsys.readouterr()
    assert "tiles in NumPy" in printed.out and "need a checkout" in printed.err


@pytest.mark.skipif(not device.available(), reason=device.NO_COMPILER)
def test_the_command_runs_the_kernels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert command.main() == 0
    assert capsys.readouterr().out.count("kernels on the CPU") == 2


@pytest.mark.parametrize("file", ["forward.cu", "backward.cu"])
def test_the_constants_of_the_launches_are_those_of_the_sources(file: str) -> None:
    text = (kernels.FOLDER / file).read_text(encoding="utf-8")
    assert f"MAX_HEAD_DIM = {kernels.MAX_HEAD_DIM}," in text and f"LANES = {kernels.LANES}," in text
    block = kernels.FORWARD_BLOCK if file == "forward.cu" else kernels.BACKWARD_BLOCK
    assert f"BLOCK_M = {block}," in text or f"BLOCK = {block};" in text


@pytest.mark.parametrize("dtype", kernels.ELEMENTS)
@pytest.mark.parametrize("file", ["forward.cu", "backward.cu"])
def test_nvrtc_compiles_the_sources(file: str, dtype: str) -> None:
    """For the oldest architecture that it knows."""
    pytest.importorskip("cupy")
    from cuflash.cuda import compile as cuda_compile

    source = (kernels.FOLDER / file).read_text(encoding="utf-8").replace("ELEMENT", kernels.ELEMENTS[dtype])
    for entry in ["forward"] if file == "forward.cu" else ["backward_dq", "backward_dkv"]:
        report = cuda_compile.compile_for("sm_75", source, entry)
        assert report.spill_bytes == 0 and not report.warnings

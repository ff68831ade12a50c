"""Tests of the GPT-2 example: its gradients, its kernels, and training that survives a kill."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuflash.distributed.__main__ import run as run_ranks
from cuflash.distributed.communicators import Communicator
from cuflash.examples.gpt2 import training
from cuflash.examples.gpt2.gpu_ops import ACTIVATION_SCALE, GRADIENT_SCALE, WEIGHT_SCALE, CupyOps
from cuflash.examples.gpt2.model import ATTENTIONS, GPT2, TINY, Config
from cuflash.examples.gpt2.ops import NumpyOps, Rounded, Weight
from cuflash.examples.gpt2.text import BPE, TOKENIZER, Text
from cuflash.examples.gpt2.training import CHECKPOINT, Run, Trainer, main
from cuflash.tools.bench import records

Array = Any
OPTIONS = ["--size", "tiny", "--context", "32", "--batch", "2", "--device", "cpu"]
RUN = Run("tiny", 32, 2, 4, 1e-3, "cuflash", True, 0)


class Float64(NumpyOps):
    """Operations in float64, for finite differences."""

    dtype = np.dtype(np.float64)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_gradients_of_every_parameter(attention: str) -> None:
    config = Config(width=16, num_layers=2, num_heads=2, context=12, vocabulary=256)
    model = GPT2(config, Float64(), ATTENTIONS[attention], seed=0)
    rng = np.random.default_rng(0)
    model.weights[:] += 0.1 * rng.normal(size=model.weights.shape)  # away from gains of 1 and biases of 0
    model.gradients = np.full(model.weights.shape, np.nan)
    model.dw = model.views(model.gradients)
    windows = rng.integers(0, 256, (3, 11))
    loss = model.loss_and_gradients(windows)
    assert float(loss) == pytest.approx(float(model.loss(windows)), rel=1e-12)
    step = 1e-5
    for name, gradient in model.dw.items():
        weight, direction = model.w[name], rng.normal(size=gradient.shape)
        before = weight.copy()
        weight[...] = before + step * direction
        above = model.loss(windows)
        weight[...] = before - step * direction
        below = model.loss(windows)
        weight[...] = before
        assert np.sum(gradient * direction) == pytest.approx((above - below) / (2 * step), rel=1e-6, abs=1e-8), name


class EightBits(NumpyOps):
    """Operations that `CupyOps` does with numbers in 8 bits, in NumPy."""

    def project(self, x: Rounded, weight: Weight, bias: Array | None = None, added: Array | None = None) -> Array:
        factors = self.rounded_to("e4m3fn", x.full, ACTIVATION_SCALE), self.weight_rounded(weight)
        return self.matmul(*factors, bias=bias, added=added)

    def project_back(self, dy: Rounded, weight: Weight) -> Array:
        scale = GRADIENT_SCALE * 2 ** len(dy.full).bit_length()
        return self.rounded_to("e5m2", dy.full, scale) @ self.weight_rounded(weight).T

    def weight_rounded(self, weight: Weight) -> Array:
        return self.rounded_to("e4m3fn", weight.full, WEIGHT_SCALE)

    @staticmethod
    def rounded_to(kind: str, x: Array, scale: float) -> Array:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        dtype = getattr(ml_dtypes, f"float8_{kind}")
        largest = float(ml_dtypes.finfo(dtype).max)
        return np.clip(scale * x, -largest, largest).astype(dtype).astype(np.float32) / np.float32(scale)


@pytest.mark.gpu
@pytest.mark.parametrize(("attention", "eight"), [("cuflash", False), ("cuflash", True), ("baseline", False)])
def test_gpu_agrees_with_the_cpu(attention: str, eight: bool) -> None:
    config = replace(TINY, context=1280)  # rows of scores that need several warps, the last one in part
    operations = (NumpyOps(), CupyOps(TINY.width, eight=eight), EightBits())[: 3 if eight else 2]
    models = [GPT2(config, ops, ATTENTIONS[attention], seed=0) for ops in operations]
    rng = np.random.default_rng(0)
    start = models[0].weights + 0.1 * rng.normal(size=models[0].weights.shape).astype("float32")
    windows = rng.integers(0, 256, (2, 1281))
    losses, gradients = [], []
    for model in models:
        xp = model.ops.xp
        model.weights[:] = xp.asarray(start).astype(model.ops.dtype)
        model.gradients[:] = np.nan
        losses.append(float(model.loss_and_gradients(xp.asarray(windows))))
        gradients.append(model.views(model.gradients if xp is np else model.gradients.get()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    for name, exact in gradients[0].items():
        error, *of_rounding = (np.linalg.norm(other[name] - exact) / np.linalg.norm(exact) for other in gradients[1:])
        # The last bit of a bfloat16 decides where its 8 bits go: the errors are as large as NumPy's, but not the same.
        assert error < (1.1 * of_rounding[0] + 0.02 if eight else 0.05), name


@pytest.mark.gpu
def test_gpu_rows_of_one_token() -> None:
    """Tokens come once, often, and never."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 40, (4, 250)).astype(np.int32) * (rng.random((4, 250)) < 0.5)
    tokens[0, 0] = 63
    start = rng.normal(size=(64, 256)).astype("float32")
    rows = rng.integers(-64, 64, (1000, 256)).astype("float32")  # exact in bfloat16
    results = []
    for ops in (NumpyOps(), CupyOps(256)):
        table = ops.xp.asarray(start).copy()
        ops.add_rows(table, ops.xp.asarray(tokens.astype(np.int32)), ops.xp.asarray(rows).astype(ops.dtype))
        results.append(table if ops.xp is np else table.get())
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-3)
    untouched = np.setdiff1d(np.arange(64), tokens)
    np.testing.assert_array_equal(results[1][untouched], start[untouched])


@pytest.mark.gpu
def test_gpu_optimizer() -> None:
    rng = np.random.default_rng(0)
    start = rng.normal(size=(4, 1000)).astype("float32")
    start[2] = np.abs(start[2])
    settings = {**training.SETTINGS, "step": 3, "rate": 0.01}
    results = []
    for ops in (NumpyOps(), CupyOps(256)):
        master, first, second, gradient = (ops.xp.asarray(x).copy() for x in start)
        weights = ops.xp.empty_like(master, dtype=ops.dtype)
        ops.adamw(weights, master, (first, second), gradient, 600, **settings)
        results.append([x if ops.xp is np else x.get() for x in (master, first, second, weights.astype("float32"))])
    for ours, expected, tolerance in zip(*reversed(results), (1e-5, 1e-5, 1e-5, 1e-2), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=tolerance, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("search", [False, True])
def test_gpu_products(search: bool) -> None:
    """Products take transposed operands, stacks, a slice as result, sums, and what may follow in the kernel."""
    ops = CupyOps(256, search)
    cupy = ops.xp
    rng = np.random.default_rng(0)

    def array(*shape: int) -> Array:
        return cupy.asarray(rng.standard_normal(shape, np.float32)).astype(ops.dtype)

    def assert_close(ours: Array, expected: Array) -> None:
        ours, expected = (x.astype(np.float32).get() for x in (ours, expected))
        np.testing.assert_allclose(ours, expected, atol=0.02 * np.abs(expected).max())

    a, b, bias = array(256, 64), array(64, 128), array(128)
    exact = a.astype(np.float32) @ b.astype(np.float32)
    assert_close(ops.matmul(a, b), exact)
    assert_close(ops.matmul(cupy.ascontiguousarray(a.T).T, cupy.ascontiguousarray(b.T).T), exact)
    assert_close(ops.matmul(a, b, bias=bias), exact + bias.astype(np.float32))
    rows = array(256, 128)
    assert_close(ops.matmul(a, b, bias=bias, added=rows), exact + (bias + rows).astype(np.float32))
    wide = cupy.ones((256, 3, 128), np.float32)
    ops.matmul(a, b, out=wide[:, 1], added=wide[:, 1])
    assert_close(wide[:, 1], exact + 1)
    assert float(wide[:, ::2].sum()) == 2 * 256 * 128
    z, active = ops.project_gelu(Rounded(a), Weight(b), bias)
    expected = (exact + bias.astype(np.float32)).get()
    assert_close(z, cupy.asarray(expected))
    assert_close(active.full, cupy.asarray(expected * NumpyOps._gelu_sigmoid(expected)))
    stack, factors = array(3, 128, 64), array(3, 64, 128)
    expected = cupy.matmul(stack.astype(np.float32), factors.astype(np.float32))
    assert_close(ops.matmul(stack, factors), expected)


@pytest.mark.gpu
def test_gpu_products_of_eight_bits() -> None:
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(shape, np.float32) for shape in ((512, 256), (256, 768), (512, 768)))
    cpu, gpu = EightBits(), CupyOps(256, eight=True)
    results = []
    for ops in (cpu, gpu):
        arrays = [gpu.xp.asarray(a).astype(gpu.dtype) for a in (x, w / 16, dy / 512)]
        if ops is cpu:
            arrays = [a.astype(np.float32).get() for a in arrays]
        weight = ops.weight(arrays[1])
        ops.refresh(weight)
        vector = ops.xp.empty(768, np.float32)
        with ops.sums_into(vector, len(dy)):
            gradient = ops.bias_gradient(arrays[2], vector)
        results.append((ops.project(ops.rounded(arrays[0]), weight), ops.project_back(gradient, weight)))
    for expected, ours in zip(*results, strict=True):
        np.testing.assert_allclose(ours.astype(np.float32).get(), expected, atol=0.01 * np.abs(expected).max())


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (2000, 256), (700, Config.vocabulary)])
def test_gpu_cross_entropy(rows: int, columns: int) -> None:
    """Each multiprocessor has several rows, and a second call gives the same bits."""
    rng = np.random.default_rng(0)
    gpu = CupyOps(256)
    logits = gpu.xp.asarray(4 * rng.standard_normal((rows, columns), np.float32)).astype(gpu.dtype)
    targets = rng.integers(0, columns, rows).astype(np.int32)
    expected, gradient = NumpyOps().cross_entropy(logits.astype(np.float32).get(), targets)
    results = [gpu.cross_entropy(logits.copy(), gpu.xp.asarray(targets)) for _ in range(3)]
    ours = [result[1].full.astype(np.float32).get() for result in results]
    assert float(results[0][0]) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(ours[0], gradient.full, rtol=0.005, atol=1e-5 / rows)
    for again in ours[1:]:
        np.testing.assert_array_equal(again, ours[0])


def trainer() -> Trainer:
    return Trainer(RUN, NumpyOps(), Text(None))


def test_goes_on_exactly(tmp_path: Path) -> None:
    whole, first, second = trainer(), trainer(), trainer()
    assert not first.load(tmp_path)
    for _ in range(RUN.steps):
        whole.advance()
    for _ in range(2):
        first.advance()
    first.save(tmp_path)
    assert second.load(tmp_path)
    while second.step < RUN.steps:
        second.advance()
    for ours, expected in zip(
        (second.model.master, *second.moments), (whole.model.master, *whole.moments), strict=True
    ):
        np.testing.assert_array_equal(ours, expected)
    assert [float(x) for x in second.losses] == [float(x) for x in whole.losses]


def test_ring_learns_as_one_device_does(tmp_path: Path) -> None:
    """Two ranks of half the tokens have the losses and parameters of one, and go on from its checkpoint."""
    text, whole = Text(None), trainer()

    def work(comm: Communicator) -> tuple[Trainer, float]:
        own = Trainer(RUN, NumpyOps(), text, comm)
        for _ in range(3):
            own.advance()
        return own, own.validate()

    for _ in range(3):
        whole.advance()
    for own, validation in run_ranks(2, work):
        np.testing.assert_allclose([float(x) for x in own.losses], [float(x) for x in whole.losses], rtol=1e-5)
        np.testing.assert_allclose(own.model.master, whole.model.master, rtol=0, atol=0.1 * RUN.rate)
        assert validation == pytest.approx(whole.validate(), rel=1e-5)


def test_ring_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*OPTIONS, "--steps", "4", "--rate", "0.001", "--deterministic"]
    whole = trainer()
    whole.advance()
    whole.save(tmp_path)
    assert main([*command, "--ring", "2", "--out", str(tmp_path)]) == 0
    with np.load(tmp_path / CHECKPOINT) as saved:
        assert len(saved["losses"]) == RUN.steps
    assert main([*command, "--ring", "3", "--out", str(tmp_path / "other")]) == 2
    assert "expected a multiple of 6 on 3 ranks, got 32" in capsys.readouterr().err


def test_refuses_the_checkpoint_of_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer().save(tmp_path)
    assert main([*OPTIONS, "--steps", "7", "--rate", "0.001", "--out", str(tmp_path)]) == 2
    assert "steps" in capsys.readouterr().err


def test_what_is_not_installed_is_said_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "find_spec", lambda name: None)
    assert main([*OPTIONS, "--out", str(tmp_path / "run")]) == 2
    assert "matplotlib, tqdm: not installed" in capsys.readouterr().err
    assert main([*OPTIONS, "--fp8", "--out", str(tmp_path / "run")]) == 2
    assert "--fp8: expected a GPU" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_killed_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was being written when the kill came is not taken for a checkpoint."""
    first = trainer()
    first.advance()
    first.save(tmp_path)
    whole = (tmp_path / CHECKPOINT).read_bytes()
    first.advance()

    def killed(*arguments: Any, **keywords: Any) -> None:
        raise SystemExit

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(SystemExit):
        first.save(tmp_path)
    assert (tmp_path / CHECKPOINT).read_bytes() == whole
    again = trainer()
    assert again.load(tmp_path) and again.step == 1


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_command_survives_a_kill(tmp_path: Path) -> None:
    for library in ("matplotlib", "tqdm"):
        pytest.importorskip(library)
    text, run = tmp_path / "text", tmp_path / "run"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog; " * 400)
    command = [sys.executable, "-m", "cuflash.examples.train_gpt2", *OPTIONS, "--text", str(text)]
    command += ["--steps", "15", "--checkpoint-every", "2", "--out", str(run)]

    def steps_before_a_kill() -> int:
        shutil.rmtree(run, ignore_errors=True)
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while not (run / CHECKPOINT).exists():
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with np.load(run / CHECKPOINT) as saved:
            return len(saved["losses"])

    # This process may have had to wait so long for a core that the other one was done before the kill.
    steps = next((n for n in (steps_before_a_kill() for _ in range(5)) if n < 15), 15)
    assert steps < 15
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert f"going on after step {steps} " in result.stdout and "tokens/s" in result.stdout
    (curve,) = records.read(run / "losses.jsonl").cells
    losses = curve["losses"]
    assert len(losses) == 15 and losses[-1] < losses[0] - 0.5
    assert (run / "loss.png").stat().st_size > 1000


def test_tokens_of_a_byte_pair_encoding(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    first = Text(None, BPE, tmp_path)
    assert (tmp_path / TOKENIZER).exists() and first.bytes_per_token > 2
    again = Text(None, BPE, tmp_path)  # by the encoding that was kept
    np.testing.assert_array_equal(first.train, again.train)
    np.testing.assert_array_equal(first.validation, again.validation)
    assert first.train.max() >= 256


def test_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "WARM_UP_STEPS", 1)
    path = tmp_path / "figures.jsonl"
    assert main([*OPTIONS, "--compare", "1", "--json", str(path)]) == 0
    results = records.read(path).cells
    assert [result["attention"] for result in results] == ["cuflash", "baseline"]
    losses = [result["loss"] for result in results]
    assert losses == pytest.approx([losses[0]] * 2, rel=1e-3)  # both train the same model on the same text
    assert "x the baseline" in capsys.readouterr().out

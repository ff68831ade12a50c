"""Train GPT-2 small (124M parameters) on a text, on CuPy alone.

    python -m cuflash.examples.train_gpt2 --text book.txt --context 1024 --steps 1000 --out run
    python -m cuflash.examples.train_gpt2 --compare 20 --context 4096 --batch 8
    python -m cuflash.examples.train_gpt2 --ring 2 --context 32768 --batch 1

The first trains, shows its progress, and leaves a checkpoint, the losses and their picture in the folder; given again,
it goes on from the checkpoint as if nothing had happened (to the bit on the CPU, and with ``--deterministic``). The
second measures the time of a step with cuflash and with plain attention by cuBLAS, in turn. The third spreads every
sequence over two GPUs; its losses are those of one GPU up to rounding, and either goes on from the other's checkpoint.
Without ``--text`` the text
is Python's own help. Tokens are bytes, or with ``--tokens bpe`` byte pairs, which the package tokenizers learns from
the text. On a GPU everything but the master weights is bfloat16, and CuPy needs cuBLAS:
``pip install "cuflash[demo,cuda13-full]"``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from cuflash.distributed.__main__ import run as run_ranks
from cuflash.distributed.communicators import Communicator
from cuflash.tools.bench import records
from cuflash.tools.bench.report import environment

from .gpu_ops import CupyOps
from .model import ATTENTIONS, GPT2, TINY, Config
from .ops import NumpyOps
from .ring import RingGPT2
from .text import BPE, BYTES, NUMBERS, Text

SIZES = {"small": Config(), "tiny": TINY}
CHECKPOINT, LOSSES, PICTURE = "checkpoint.npz", "losses.jsonl", "loss.png"
SETTINGS = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "decay": 0.1, "clip": 1.0}
WARM_UP, FINAL_RATE = 0.05, 0.1  # fractions: of the steps, and of the rate
VALIDATION_BATCHES = 4
WARM_UP_STEPS, STEPS_A_TURN = 3, 2  # of a comparison


class Stopwatch:
    """Times a step and the attention in it: by events on a GPU, read when a later step was enqueued already."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.sees_attention = True  # at 2.5 us an event, which all that follows waits for
        self.spans: list[tuple[Any, Any]] = []  # of the step under way: its calls of attention
        self.unread: list[list[tuple[Any, Any]]] = []  # of each step: itself, then those
        self.steps: list[float] = []  # seconds
        self.attentions: list[float] = []

    def now(self) -> Any:
        """A point in time."""
        return time.perf_counter() if self.xp is np else self.xp.cuda.get_current_stream().record()

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, which leaves its span of time."""

        def run(*arguments: Any) -> Any:
            if not self.sees_attention:
                return call(*arguments)
            start = self.now()
            result = call(*arguments)
            self.spans.append((start, self.now()))
            return result

        return run

    def attention(self, attention: Callable[..., Any]) -> Callable[..., Any]:
        """The same attention, whose forward and backward passes leave theirs."""

        def run(*arguments: Any) -> Any:
            out, backward = self.timed(attention)(*arguments)
            return out, self.timed(backward)

        return run

    def read(self, but: int = 0) -> None:
        """Add the steps made to `steps` and `attentions`, but for the last few."""
        while len(self.unread) > but:
            step, *attentions = (self._seconds(*span) for span in self.unread.pop(0))
            self.steps.append(step)
            if attentions:
                self.attentions.append(sum(attentions))

    def _seconds(self, start: Any, end: Any) -> float:
        if self.xp is np:
            return float(end - start)
        end.synchronize()
        return float(self.xp.cuda.get_elapsed_time(start, end)) / 1e3

    def describe(self, tokens: int) -> str:
        """The median step in words."""
        step, attention = np.median(self.steps), np.median(self.attentions)
        return (
            f"{1e3 * step:.1f} ms a step, {tokens / step:,.0f} tokens/s, "
            f"attention {1e3 * attention:.1f} ms = {attention / step:.0%} of the step"
        )


@dataclass(frozen=True)
class Run:
    """A run is what determines training, and so must be the same when it goes on."""

    size: str
    context: int
    batch: int
    steps: int
    rate: float
    attention: str
    deterministic: bool
    seed: int
    tokens: str = BYTES
    fp8: bool = False

    @property
    def config(self) -> Config:
        """The model's size."""
        config = replace(SIZES[self.size], context=self.context)
        return config if config.vocabulary >= NUMBERS[self.tokens] else replace(config, vocabulary=Config.vocabulary)


class Trainer:
    """A model with its optimizer, which moves on step by step."""

    def __init__(self, run: Run, ops: NumpyOps, text: Text, comm: Communicator | None = None) -> None:
        self.run, self.ops, self.text = run, ops, text
        self.is_first = comm is None or comm.rank == 0  # of the ranks, which saves and shows
        self.watch = Stopwatch(ops.xp)
        attention: Callable[..., Any] = ATTENTIONS[run.attention]
        if run.deterministic and run.attention == "cuflash":  # all else here sums in one order anyway
            attention = partial(attention, deterministic=True)
        if comm is None:
            self.model = GPT2(run.config, ops, self.watch.attention(attention), run.seed)
        else:
            self.model = RingGPT2(run.config, ops, comm, self.watch.attention, run.seed, run.deterministic or None)
        self.moments = tuple(ops.xp.zeros_like(self.model.master) for _ in range(2))
        self.losses: list[float] = []

    @property
    def step(self) -> int:
        """Steps made."""
        return len(self.losses)

    def rate(self) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        progress = self.step / self.run.steps
        if progress < WARM_UP:
            return self.run.rate * (self.step + 1) / math.ceil(WARM_UP * self.run.steps)
        cosine = (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP))) / 2
        return self.run.rate * (FINAL_RATE + (1 - FINAL_RATE) * cosine)

    def advance(self) -> None:
        """One step; its loss is still on the device, so that nobody waits."""
        model, watch = self.model, self.watch
        windows = self.text.windows(self.text.train, (self.run.seed, self.step), self.run.batch, self.run.context)
        start, watch.spans = watch.now(), []
        loss = model.loss_and_gradients(self.ops.xp.asarray(windows))
        settings = {**SETTINGS, "step": self.step + 1, "rate": self.rate()}
        self.ops.adamw(model.weights, model.master, self.moments, model.gradients, model.decayed, **settings)
        watch.unread.append([(start, watch.now()), *watch.spans])
        watch.read(but=2)
        self.losses.append(loss)

    def validate(self) -> float:
        """Loss on a few windows of the text held out, always the same ones."""
        batches = (
            self.text.windows(self.text.validation, (i,), self.run.batch, self.run.context)
            for i in range(VALIDATION_BATCHES)
        )
        return float(np.mean([float(self.model.loss(self.ops.xp.asarray(windows))) for windows in batches]))

    def save(self, folder: Path) -> None:
        """Replace the checkpoint. It is whole at every moment: a kill leaves the new one or the one before."""
        arrays = dict(zip(("master", "first", "second"), (self.model.master, *self.moments), strict=True))
        if self.ops.xp is not np:
            arrays = {name: x.get() for name, x in arrays.items()}
        self.losses = [float(loss) for loss in self.losses]
        unfinished = folder / f"{CHECKPOINT}.unfinished"
        with unfinished.open("wb") as file:
            np.savez(file, run=json.dumps(asdict(self.run)), losses=np.array(self.losses), **arrays)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(folder / CHECKPOINT)

    def load(self, folder: Path) -> bool:
        """Go on from the folder's checkpoint if there is one; ValueError if it is of another run."""
        path = folder / CHECKPOINT
        if not path.exists():
            return False
        with np.load(path) as saved:
            its = json.loads(str(saved["run"]))
            if its != asdict(self.run):
                other = {name: value for name, value in its.items() if value != asdict(self.run)[name]}
                raise ValueError(f"{path} is of a run with {other}: give the same options, or another --out")
            for array, name in zip((self.model.master, *self.moments), ("master", "first", "second"), strict=True):
                array[:] = self.ops.xp.asarray(saved[name])
            self.losses = saved["losses"].tolist()
        self.model.weights[:] = self.model.master.astype(self.ops.dtype)
        return True


def train(trainer: Trainer, folder: Path, checkpoint_every: int) -> None:
    """To the last step, with a progress bar and checkpoints."""
    from tqdm import tqdm

    run = trainer.run
    tokens = run.batch * run.context
    total, hidden = run.steps * tokens, not trainer.is_first
    with tqdm(total=total, initial=trainer.step * tokens, unit=" tokens", unit_scale=True, disable=hidden) as bar:
        while trainer.step < run.steps:
            trainer.advance()
            bar.update(tokens)
            if trainer.step % 10 == 0:  # seldom: reading the loss makes the host wait
                bar.set_postfix(loss=f"{float(trainer.losses[-1]):.3f}")
            if trainer.is_first and (trainer.step % checkpoint_every == 0 or trainer.step == run.steps):
                trainer.save(folder)
    trainer.watch.read()


def train_and_validate(args: argparse.Namespace, trainer: Trainer) -> tuple[Trainer, float]:
    """All steps that are left, and the loss of the text held out."""
    if trainer.load(args.out) and trainer.is_first:
        print(f"going on after step {trainer.step} of {args.out / CHECKPOINT}")
    train(trainer, args.out, args.checkpoint_every)
    return trainer, trainer.validate()


def train_on_ranks(args: argparse.Namespace, run: Run, text: Text) -> tuple[Trainer, float]:
    """The same on every rank, each a thread with a GPU of its own; the first one's results."""
    if run.attention != "cuflash":
        raise ValueError(f"--ring: expected --attention cuflash, got {run.attention}")
    device = "cpu" if type(choose_ops(args.device, SIZES[run.size].width, False, run.fp8)) is NumpyOps else "gpu"

    def work(comm: Communicator) -> tuple[Trainer, float]:
        ops = choose_ops(device, SIZES[run.size].width, run.deterministic, run.fp8)
        return train_and_validate(args, Trainer(run, ops, text, comm))

    results: list[tuple[Trainer, float]] = run_ranks(args.ring, work, None if device == "cpu" else range(args.ring))
    return results[0]


def compare(run: Run, ops: NumpyOps, text: Text, rounds: int) -> dict[str, Any]:
    """Steps with each attention in turn, each on a model of its own that starts from the same parameters."""
    trainers = {name: Trainer(replace(run, attention=name), ops, text) for name in ATTENTIONS}
    for trainer in trainers.values():
        for _ in range(WARM_UP_STEPS):
            trainer.advance()
        trainer.watch.read()
        trainer.watch.steps, trainer.watch.attentions = [], []
    # Whole steps, then, in steps that do not count, the attention in them.
    for sees_attention in (False, True):
        whole = {name: trainer.watch.steps for name, trainer in trainers.items()}
        for trainer in trainers.values():
            trainer.watch.sees_attention = sees_attention
            trainer.watch.steps = []
        for _ in range(1 if sees_attention else rounds):
            for trainer in trainers.values():
                for _ in range(STEPS_A_TURN):
                    trainer.advance()
                trainer.watch.read()
    for name, trainer in trainers.items():
        trainer.watch.steps = whole[name]
    tokens = run.batch * run.context
    results: dict[str, Any] = {}
    baseline = float(np.median(trainers["baseline"].watch.steps))
    for name, trainer in trainers.items():
        step, attention = (float(np.median(x)) for x in (trainer.watch.steps, trainer.watch.attentions))
        results[name] = {
            "step_ms": 1e3 * step,
            "attention_ms": 1e3 * attention,
            "attention_share": attention / step,
            "tokens_per_second": tokens / step,
            "speed_of_baseline": baseline / step,
            "loss": float(trainer.losses[-1]),
        }
        print(f"{name:10} {trainer.watch.describe(tokens)}, {baseline / step:.2f} x the baseline")
    return results


def draw(losses: list[float], unit: str, path: Path) -> None:
    """The picture of the loss, and of its mean over the last steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel=f"loss (nats a {unit})", title="GPT-2 with cuflash on CuPy")
    width = max(1, len(losses) // 50)
    steps = np.arange(1, len(losses) + 1)
    axes.plot(steps, losses, lw=0.5, alpha=0.5)
    axes.plot(steps[width - 1 :], np.convolve(losses, np.full(width, 1 / width), "valid"))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m cuflash.examples.train_gpt2",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--text", type=Path, help="file to train on (default: Python's own help)")
    add("--tokens", choices=NUMBERS, default=BYTES, help="bpe: byte pairs, learned from the text (default %(default)s)")
    add("--size", choices=SIZES, default="small", help="small: 124M parameters; tiny: to try it on a CPU")
    add("--context", type=int, default=1024, help="tokens in a sequence (default %(default)s)")
    add("--batch", type=int, default=32, help="sequences in a step (default %(default)s)")
    add("--steps", type=int, default=1000, help="(default %(default)s)")
    add("--rate", type=float, default=6e-4, help="highest learning rate (default %(default)s)")
    add("--attention", choices=ATTENTIONS, default="cuflash")
    add("--fp8", action="store_true", help="products with weights in 8 bits: from compute capability 8.9 on")
    add("--deterministic", action="store_true", help="gradients summed in one order: runs repeat to the bit, slower")
    add("--ring", type=int, metavar="N", help="spread every sequence over N GPUs (with --device cpu: N threads)")
    add("--device", choices=("cpu", "gpu"), help="default: the GPU if there is one")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("gpt2_run"), help="folder of the results (default %(default)s)")
    add("--checkpoint-every", type=int, default=200, metavar="STEPS", help="(default %(default)s)")
    add("--compare", type=int, metavar="ROUNDS", help="time the steps with each attention instead, in so many turns")
    add("--json", type=Path, help="file for the figures of --compare, one line each attention")
    add("--commit", help="of the code, to be recorded where the checkout does not tell")
    return parser.parse_args(argv)


def choose_ops(device: str | None, width: int, deterministic: bool, eight: bool) -> NumpyOps:
    """On the GPU if there is one and `device` allows it."""
    if device != "cpu":
        try:
            return CupyOps(width, search=not deterministic, eight=eight)
        except (ImportError, OSError, RuntimeError) as error:  # no CuPy, no cuBLAS, no GPU
            if device == "gpu":
                line = str(error).partition("\n")[0]
                raise ValueError(f"{line}: python -m cuflash info tells what is missing") from error
    if eight:
        raise ValueError("--fp8: expected a GPU")
    return NumpyOps()


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    args = parse(argv)
    names = ("size", "context", "batch", "steps", "rate", "attention", "deterministic", "seed", "tokens", "fp8")
    run = Run(**{name: getattr(args, name) for name in names})
    try:
        ops = choose_ops(args.device, SIZES[args.size].width, args.deterministic, args.fp8)
        if args.compare:
            results = compare(run, ops, Text(args.text, args.tokens), args.compare)
            if args.json:
                facts = environment(ops.xp, args.commit, "train_gpt2") | {"run": asdict(run)}
                records.write(args.json, facts, ({"attention": name, **r} for name, r in results.items()))
            return 0
        absent = [name for name in ("matplotlib", "tqdm") if find_spec(name) is None]
        if absent:  # said now, not after the last step
            raise ValueError(f'{", ".join(absent)}: not installed, pip install "cuflash[demo]"')
        args.out.mkdir(parents=True, exist_ok=True)
        text = Text(args.text, args.tokens, args.out)
        if args.ring:
            trainer, validation = train_on_ranks(args, run, text)
        else:
            trainer, validation = train_and_validate(args, Trainer(run, ops, text))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nstopped; the same command goes on from the last checkpoint in {args.out}", file=sys.stderr)
        return 130
    draw(trainer.losses, "token" if args.tokens == BPE else "byte", args.out / PICTURE)
    facts = environment(ops.xp, args.commit, "train_gpt2") | {"run": asdict(run)}
    records.write(args.out / LOSSES, facts, [{"validation": validation, "losses": trainer.losses}])
    of_byte = f"{validation / text.bytes_per_token:.3f} nats a byte"
    of_token = f"{validation:.3f} nats a token, " if args.tokens == BPE else ""
    print(f"{trainer.model.master.size:,} parameters; loss of the text held out: {of_token}{of_byte}")
    if trainer.watch.steps:
        print(trainer.watch.describe(run.batch * run.context))
    print(f"picture of the loss: {args.out / PICTURE}")
    return 0

"""Continue several texts at once with a model that train_gpt2 has trained, from a paged cache of keys and values.

    python -m cuflash.examples.train_gpt2 --size tiny --context 256 --steps 300 --out run
    python -m cuflash.examples.generate run --prompt "The with statement" --prompt "A list is" --length 200

Texts begin as places and pages become free and end when they are long enough, each at its own time: a step has packed
rows, a whole prompt of one text beside a single token of another. What stands before every prompt (``--prefix``) is
computed once, and its pages are shared. `generate` below serves any model; that of the demo, for one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cuflash import PagedCache

Array = Any
Attend = Callable[..., Array]


class Model(Protocol):
    """A model is what can be generated from."""

    num_layers: int
    num_heads: int
    head_dim: int
    attention_dtype: Any
    xp: Any  # numpy or cupy

    def logits(self, tokens: Array, positions: Array, wanted: Array, attend: Attend) -> Array:
        """Logits (rows, vocabulary) of what follows the tokens of the wanted rows.

        Tokens and positions are packed, (total,); each layer calls ``attend(layer, q, k, v)`` once, with arrays (total,
        num_heads, head_dim) and options of attention and ``rotary=`` if it has some.
        """


@dataclass
class _Text:
    """A text that is being continued: its tokens behind the shared prefix."""

    index: int
    tokens: list[int]
    missing: int  # tokens to be drawn
    sequence: int = -1


def cache_for(model: Model, num_pages: int, page_size: int = 16, longest: int | None = None) -> PagedCache:
    """A cache of a model's layers, for texts of so many tokens at most: block tables are as wide as these need."""
    sizes = model.num_layers, num_pages, page_size, model.num_heads, model.head_dim
    width = None if longest is None else -(-longest // page_size)
    return PagedCache(*sizes, model.attention_dtype, model.xp, max_pages_per_sequence=width)


def generate(
    model: Model,
    cache: PagedCache,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    prefix: Sequence[int] = (),
    at_once: int = 8,
    temperature: float = 0.8,
    seed: int = 0,
) -> Iterator[tuple[int, int]]:
    """Continue prompts, `at_once` of them at a time, and yield (number of the prompt, token) as tokens are drawn.

    A text's draws depend on `seed` and its number, not on the texts beside it. Where no page is left, the text that
    came last is put back, and computed again when there are some.
    """
    beginning = [*prefix]
    shared = _read(model, cache, beginning[:-1])
    texts = (
        _Text(index, [*beginning[-1:], *prompt], length)
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    )
    waiting = deque(text for text in texts if text.missing > 0)
    if not all(text.tokens for text in waiting):
        raise ValueError("prompts: expected a token at least in each, or in the prefix, got none")
    generators = {text.index: np.random.default_rng((seed, text.index)) for text in waiting}
    running: list[_Text] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(waiting.popleft())
                running[-1].sequence = cache.fork(shared)
            logits = _advance(model, cache, running, waiting, len(beginning[:-1]))
            for text, row in zip(tuple(running), logits, strict=True):
                text.tokens.append(draw(row, temperature, generators[text.index]))
                text.missing -= 1
                if text.missing == 0:
                    running.remove(text)
                    cache.free(text.sequence)
                yield text.index, text.tokens[-1]
    finally:
        for sequence in (shared, *(text.sequence for text in running)):
            cache.free(sequence)


def _read(model: Model, cache: PagedCache, tokens: list[int]) -> int:
    """A new sequence with these tokens."""
    sequence = cache.add()
    if tokens:
        _run(model, cache, [sequence], [tokens])
    return sequence


def _advance(model: Model, cache: PagedCache, running: list[_Text], waiting: deque[_Text], num_shared: int) -> Array:
    """Logits on the host, float32, of what follows each running text; some of them may have to wait again."""
    while True:
        new = [text.tokens[cache.length(text.sequence) - num_shared :] for text in running]
        try:
            return _run(model, cache, [text.sequence for text in running], new)
        except MemoryError:
            if len(running) == 1:
                raise
            waiting.appendleft(running.pop())
            cache.free(waiting[0].sequence)


def _run(model: Model, cache: PagedCache, sequences: list[int], new: list[list[int]]) -> Array:
    """Add tokens to sequences, and return the logits behind the last of each, on the host."""
    xp = model.xp
    counts = [len(tokens) for tokens in new]
    step = cache.step(sequences, counts)

    def attend(layer: int, q: Array, k: Array, v: Array, rotary: Any = None, **options: Any) -> Array:
        return step.attend(layer, step.append(layer, q, k, v, rotary=rotary), **options)

    tokens = np.concatenate([np.array(own, np.int32) for own in new])
    positions = np.concatenate(
        [np.arange(cache.length(s) - n, cache.length(s)) for s, n in zip(sequences, counts, strict=True)]
    )
    wanted = np.cumsum(counts) - 1
    logits = model.logits(xp.asarray(tokens), xp.asarray(positions), xp.asarray(wanted), attend).astype(np.float32)
    return logits if xp is np else xp.asnumpy(logits)


def draw(logits: Array, temperature: float, generator: np.random.Generator) -> int:
    """A token by its probability, or at temperature 0 the likeliest one."""
    if temperature == 0:
        return int(np.argmax(logits))
    # Adding Gumbel noise makes the largest logit a draw from the softmax.
    return int(np.argmax(logits / temperature + generator.gumbel(size=len(logits))))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m cuflash.examples.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run", type=Path, help="folder that train_gpt2 left")
    add("--prompt", action="append", default=[], metavar="TEXT", help="a text to continue; may be given several times")
    add("--prefix", default="", metavar="TEXT", help="what stands before every prompt")
    add("--length", type=int, nargs="+", default=[200], metavar="N", help="tokens to draw, for all or for each prompt")
    add("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default %(default)s)")
    add("--seed", type=int, default=0)
    add("--at-once", type=int, default=8, metavar="N", help="texts in one step, at most (default %(default)s)")
    add("--page-size", type=int, default=16, help="positions of a page (default %(default)s)")
    add("--pages", type=int, help="pages of the cache (default: as many as could be wanted)")
    add("--device", choices=("cpu", "gpu"), help="default: the GPU if there is one")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    args = parse(argv)
    try:
        from tqdm import tqdm

        from .gpt2.generating import load
    except ImportError as error:
        print(f"error: {error}: pip install -e '.[demo]' in a checkout of cuflash", file=sys.stderr)
        return 2
    prompts = args.prompt or [""]
    lengths = args.length * len(prompts) if len(args.length) == 1 else args.length
    try:
        if len(lengths) != len(prompts):
            raise ValueError(f"--length: expected one number, or one for each prompt, got {len(lengths)}")
        model, codec = load(args.run, args.device)
        prefix, tokens = codec.encode(args.prefix), [codec.encode(prompt) for prompt in prompts]
        longest = max(len(prefix) + len(own) + n for own, n in zip(tokens, lengths, strict=True))
        if longest > model.context:
            raise ValueError(f"--length: expected at most the model's {model.context} tokens in all, got {longest}")
        pages = args.pages or (args.at_once + 1) * (-(-longest // args.page_size) + 1)
        cache = cache_for(model, pages, args.page_size, longest)
        drawn: list[list[int]] = [[] for _ in prompts]
        start, first = time.perf_counter(), 0.0
        with tqdm(total=sum(lengths), unit=" tokens", mininterval=0.5) as bar:
            settings = (args.at_once, args.temperature, args.seed)
            for index, token in generate(model, cache, tokens, lengths, prefix, *settings):
                first = first or time.perf_counter() - start
                drawn[index].append(token)
                bar.update()
                bar.set_postfix(pages=f"{pages - cache.num_free_pages}/{pages}", refresh=False)
        seconds = time.perf_counter() - start
    except (MemoryError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for prompt, own in zip(prompts, drawn, strict=True):
        print(f"--- {args.prefix}{prompt}{codec.decode(own)}")
    count = sum(map(len, drawn))
    print(f"{count} tokens of {len(prompts)} texts in {seconds:.1f} s, the first after {first:.2f} s: ", end="")
    print(f"{count / seconds:,.0f} tokens/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

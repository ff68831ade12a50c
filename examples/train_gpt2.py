"""Train GPT-2 small (124M parameters) on a text, on CuPy alone.

    python -m cuflash.examples.train_gpt2 --text book.txt --context 1024 --steps 1000 --out run
    python -m cuflash.examples.train_gpt2 --compare 20 --context 4096 --batch 8

The first trains, shows its progress, and leaves a checkpoint, the losses and their picture in the folder; given again,
it goes on from the checkpoint as if nothing had happened (to the bit on the CPU, and with ``--deterministic``). The
second measures the time of a step with cuflash and with plain attention by cuBLAS, in turn. Without ``--text`` the text
is Python's own help. Tokens are bytes, or with ``--tokens bpe`` byte pairs, which the package tokenizers learns from
the text. On a GPU everything but the master weights is bfloat16, and CuPy needs cuBLAS:
``pip install "cuflash[demo,cuda13-full]"``.
"""

from __future__ import annotations

import sys

try:
    from .gpt2.training import main
except ModuleNotFoundError as error:
    if not (error.name or "").endswith("examples.gpt2"):
        raise
    message = "GPT-2 is trained in a checkout of cuflash, installed by: pip install -e '.[demo,cuda13-full]'"
    raise SystemExit(message) from error

if __name__ == "__main__":
    sys.exit(main(__doc__))

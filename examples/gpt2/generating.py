"""A trained GPT-2 to generate from, out of the folder that training left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from .model import ATTENTIONS, GPT2
from .ops import Array, NumpyOps
from .text import NUMBERS, Codec
from .training import CHECKPOINT, Run, choose_ops


class Decoder:
    """The model as ``generate`` wants it: the layers' attention is given from outside, with a cache behind it."""

    def __init__(self, model: GPT2, num_numbers: int) -> None:
        config = model.config
        self.model, self._num_numbers = model, num_numbers
        self.num_layers, self.num_heads = config.num_layers, config.num_heads
        self.head_dim = config.width // config.num_heads
        self.context = config.context
        self.attention_dtype, self.xp = model.ops.dtype, model.ops.xp

    def logits(self, tokens: Array, positions: Array, wanted: Array, attend: Any) -> Array:
        """Logits of what follows the wanted rows, of numbers that a text may have."""
        return self.model.logits(tokens, positions, wanted, attend)[:, : self._num_numbers]


def load(folder: Path, device: str | None = None) -> tuple[Decoder, Codec]:
    """The model of a folder's checkpoint, and its way from texts to tokens; OSError where there is none."""
    with np.load(folder / CHECKPOINT) as saved:
        run, master = Run(**json.loads(str(saved["run"]))), saved["master"]
    config = run.config
    # Lengths change from step to step, so that a search for each one's products would not pay.
    ops: NumpyOps = choose_ops(device, config.width, deterministic=True, eight=False)
    model = GPT2(config, ops, ATTENTIONS["cuflash"], run.seed)
    model.master[:] = ops.xp.asarray(master)
    model.weights[:] = model.master.astype(ops.dtype)
    return Decoder(model, NUMBERS[run.tokens]), Codec(run.tokens, folder)

"""The text to train on, as bytes or as tokens of a byte-pair encoding that is learned from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

Array = Any

BYTES, BPE = "bytes", "bpe"
NUMBERS = {BYTES: 256, BPE: 50257}  # that there may be; GPT-2's encoding has as many
TOKENIZER = "tokenizer.json"


class Text:
    """A text in numbers; the last twentieth is held out.

    Parameters
    ----------
    path : Path or None
        The file, or Python's own help.
    kind : {"bytes", "bpe"}
        Byte-pair encoding needs the package tokenizers, and downloads nothing: it is learned from the part to train on.
    folder : Path or None
        Where the encoding is kept, and found again.

    Attributes
    ----------
    train, validation : array
        The numbers of both parts.
    bytes_per_token : float
        Of the part held out.
    """

    def __init__(self, path: Path | None, kind: str = BYTES, folder: Path | None = None) -> None:
        if path is not None:
            content = path.read_bytes()
        else:
            from pydoc_data.topics import topics

            content = "\n\n".join(topics.values()).encode()
        parts = np.split(np.frombuffer(content, np.uint8), [len(content) * 19 // 20])
        held_out = len(parts[1])
        if kind == BPE:
            texts = [part.tobytes().decode("utf-8", "replace") for part in parts]
            tokenizer = _tokenizer(texts[0], folder)
            parts = [np.array(tokenizer.encode(text).ids, np.uint16) for text in texts]
        self.train, self.validation = parts
        self.bytes_per_token = held_out / max(1, len(parts[1]))

    def windows(self, part: Array, seed: tuple[int, ...], batch: int, context: int) -> Array:
        """`batch` random pieces of context + 1 tokens, a pure function of the seed."""
        if len(part) <= context:
            raise ValueError(f"the text is too short: a part of {len(part)} tokens for a context of {context}")
        starts = np.random.default_rng(seed).integers(0, len(part) - context, (batch, 1))
        return part[starts + np.arange(context + 1)].astype(np.int32)


class Codec:
    """The way from a text to its numbers, and back, of a model that was trained on such numbers.

    Parameters
    ----------
    kind : {"bytes", "bpe"}
    folder : Path
        Where the training left its encoding.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        self._tokenizer = _tokenizer("", folder) if kind == BPE else None

    def encode(self, text: str) -> list[int]:
        """Its numbers."""
        return list(text.encode()) if self._tokenizer is None else list(self._tokenizer.encode(text).ids)

    def decode(self, numbers: list[int]) -> str:
        """The text of numbers."""
        if self._tokenizer is None:
            return bytes(numbers).decode("utf-8", "replace")
        return str(self._tokenizer.decode(numbers))


def _tokenizer(text: str, folder: Path | None) -> Any:
    """The folder's, or one learned from `text` and kept there."""
    try:
        from tokenizers import ByteLevelBPETokenizer, Tokenizer
    except ImportError as error:
        raise ValueError('tokenizers: not installed, pip install "cuflash[bpe]"') from error
    path = folder / TOKENIZER if folder else None
    if path and path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(text.splitlines(keepends=True), NUMBERS[BPE], show_progress=False)
    if path:
        unfinished = path.with_suffix(".unfinished")  # a kill leaves no half of a file
        tokenizer.save(str(unfinished))
        unfinished.replace(path)
    return tokenizer

"""Types of arguments that the commands share: each says what it expected and what it got."""

import argparse
import re
from pathlib import Path

from cuflash.hardware import KNOWN_ARCHITECTURES, capability_of

PICTURES = ".png", ".svg", ".pdf"


def positive(text: str) -> int:
    """An integer from 1 up."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def positive_number(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def architecture(text: str) -> str:
    """The name of an architecture of a generation from Volta to the newest that is known."""
    majors = {capability_of(name)[0] for name in KNOWN_ARCHITECTURES}
    if re.fullmatch(r"sm_\d{2,3}[af]?", text) is None or capability_of(text)[0] not in majors:
        first, last = KNOWN_ARCHITECTURES[0], KNOWN_ARCHITECTURES[-1]
        raise argparse.ArgumentTypeError(
            f"expected an architecture from {first} to {last}, such as sm_80 or sm_90a, got {text!r}"
        )
    return text


def picture(text: str) -> Path:
    """The path of a picture, whose end says its format."""
    if Path(text).suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"expected a file that ends in {', '.join(PICTURES)}, got {text!r}")
    return Path(text)

"""Types of arguments that the commands share: each says what it expected and what it got."""

import argparse
import re


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
    """The name of an architecture from Volta on."""
    found = re.fullmatch(r"sm_(\d{2,3})[af]?", text)
    if found is None or int(found[1]) < 70:
        raise argparse.ArgumentTypeError(
            f"expected an architecture from sm_70 on, such as sm_80 or sm_90a, got {text!r}"
        )
    return text

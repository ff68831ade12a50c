"""Train GPT-2 small on a text, on CuPy alone; what the command takes is in gpt2/training.py."""

import sys

try:
    from .gpt2.training import main
except ModuleNotFoundError as error:
    if not (error.name or "").endswith("examples.gpt2"):
        raise
    message = "GPT-2 is trained in a checkout of cuflash, installed by: pip install -e '.[demo,cuda13-full]'"
    raise SystemExit(message) from error

if __name__ == "__main__":
    sys.exit(main())

"""Train GPT-2 small on a text, on CuPy alone: ``python -m cuflash.examples.gpt2`` in a checkout."""

import sys

from .training import main

if __name__ == "__main__":
    sys.exit(main())

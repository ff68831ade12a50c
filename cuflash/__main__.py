"""``python -m cuflash info | compile | tune | bench | demo``."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from cuflash import __version__

# Modules with add_arguments(parser) and run(args) -> exit status, and what they do.
_COMMANDS = {
    "info": ("cuflash.tools.info", "versions, GPU, what is missing, and which kernels a problem can take, and takes"),
    "compile": ("cuflash.tools.compile", "compile kernels ahead of their first use, or for a GPU that is not here"),
    "tune": ("cuflash.tools.tune", "time the candidates of problems on the GPU here, next to what plans predict"),
    "bench": ("cuflash.tools.bench", "time forward and backward next to the other libraries that are installed"),
    "demo": ("cuflash.tools.demo", "train a small character GPT, on the GPU if there is one"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0 for success, 1 for a failed check, 2 for wrong use or something missing."""
    argv = sys.argv[1:] if argv is None else argv
    commands = "\n".join(f"  {name:9}{summary}" for name, (_, summary) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m cuflash",
        usage="%(prog)s [-h] [--version] command ...",
        description="Exact attention for CuPy, NumPy and every library that speaks DLPack.",
        epilog=f"commands (each has its own --help):\n{commands}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"cuflash {__version__}")
    parser.add_argument("command", choices=_COMMANDS, metavar="command", help="one of those below")
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    name = parser.parse_args(argv[:1]).command

    module_name, summary = _COMMANDS[name]
    module = import_module(module_name)
    command_parser = argparse.ArgumentParser(prog=f"{parser.prog} {name}", description=summary)
    module.add_arguments(command_parser)
    args = command_parser.parse_args(argv[1:])
    try:
        status: int = module.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130  # shells report Ctrl-C so
    except BrokenPipeError:  # the reader has seen enough, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest of the output goes nowhere at exit
        return 0
    return status


if __name__ == "__main__":
    sys.exit(main())

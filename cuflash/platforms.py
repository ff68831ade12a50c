"""What differs between operating systems: names and places of libraries."""

from __future__ import annotations

import sys
from pathlib import Path


def driver_library() -> str:
    """What the CUDA driver's own library is called; the system knows where it is."""
    return "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def blas_libraries(numpy_package: Path, extension: Path) -> list[Path]:
    """Where functions of NumPy's BLAS may be found, best first.

    Parameters
    ----------
    numpy_package : Path
        The folder of NumPy.
    extension : Path
        NumPy's module that calls BLAS. A library that it links to is found through it, but not on Windows: there a
        file has only its own functions.
    """
    own = sorted((numpy_package.parent / "numpy.libs").glob("*openblas*"))  # of wheels for Linux and Windows
    return own if sys.platform == "win32" else [extension, *own]

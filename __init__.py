"""A checkout as the package `cuflash`, for programs that run in the folder which holds it.

There Python takes the checkout, whose folder has the package's name, before anything that is installed; without this
file it would be a package in which nothing is.
"""

import importlib.util
import sys
from pathlib import Path

if __name__ == "cuflash":
    _folder = Path(__file__).resolve().parent / "cuflash"
    _spec = importlib.util.spec_from_file_location(
        __name__, _folder / "__init__.py", submodule_search_locations=[str(_folder)]
    )
    assert _spec is not None and _spec.loader is not None
    # Who imports this file gets what stands here then.
    sys.modules[__name__] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[__name__])

"""Hopper's forward kernels keep their numbers in registers with another NVRTC, too, such as the first one of CUDA 13.

CUFLASH_TEST_NVRTC names the folder of its libraries. A process has one NVRTC, so that the compilation has its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compiling import needs_compiler, source

from cuflash.cuda import compile as cuda_compile
from cuflash.plan.listing import families as listing
from cuflash.plan.listing import sm90 as sm90_listing

FOLDER = os.environ.get("CUFLASH_TEST_NVRTC", "")


def sample() -> list[Any]:
    """Return a record of each way to take queries and keys: heads as rows, splits, pages, lists of work, and both."""
    found: dict[Any, Any] = {}
    for config, dtype in listing.kernels(sm90_listing.of_forward()):
        if dtype == "bfloat16" and config.entry == "forward_sm90":
            way = config.packs_heads, config.splits_keys, config.has_pages, config.has_work_list, config.consumers
            found.setdefault(way, config)
    return list(found.values())


def report() -> None:
    """Print the version of NVRTC, and of each record of the sample its name and its bytes of local memory."""
    from cupy.cuda import nvrtc

    rows = []
    for config in sample():
        made = cuda_compile.compile_for("sm_90a", source(config), config.entry)
        rows.append((f"{config.head_dim} {config.tile} {config.flags}", made.local_bytes))
    print(json.dumps([nvrtc.getVersion(), rows]))


@needs_compiler
@pytest.mark.skipif(not FOLDER, reason="CUFLASH_TEST_NVRTC names no folder with another NVRTC")
def test_numbers_stay_in_registers() -> None:
    (library,) = Path(FOLDER).glob("libnvrtc.so.*")
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support"), *sys.path]
    environment = os.environ | {
        "LD_LIBRARY_PATH": FOLDER,
        "LD_PRELOAD": str(library),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    command = [sys.executable, "-c", "import test_other_compiler; test_other_compiler.report()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    version, rows = json.loads(done.stdout.splitlines()[-1])
    assert version[0] == int(library.name.rsplit(".", 1)[1])
    assert len(rows) > 5
    assert [row for row in rows if row[1]] == []

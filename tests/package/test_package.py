"""The package is as a user should get it: the wheel's files, the cost of an import, and no need of CuPy."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import cuflash

ROOT = Path(__file__).parents[2]
PUBLIC = {
    "BlockMask",
    "PagedCache",
    "__version__",
    "append_kv",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_varlen_vjp",
    "attention_vjp",
    "hadamard",
    "merge",
    "merge_backward",
    "progress",
    "quantize_fp8",
}


def python(code: str, env: dict[str, str] | None = None) -> str:
    """Run `code` in a fresh interpreter, away from the checkout, and return what it prints."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(sys.executable).parent, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def sources(folder: str, *suffixes: str) -> set[str]:
    """Return paths below `folder` of the checkout, without those that a run leaves behind."""
    top = ROOT / folder
    return {path.relative_to(top).as_posix() for path in top.rglob("*") if path.suffix in suffixes}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel by pip from a clean copy of the sources."""
    clean = tmp_path_factory.mktemp("sources")
    for folder in ("cuflash", "cuda_src", "examples"):
        shutil.copytree(ROOT / folder, clean / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (clean / "docs").mkdir()
    for file in ("setup.cfg", "pyproject.toml", "docs/package.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / file, clean / file)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(clean), str(clean)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    (path,) = clean.glob("*.whl")
    assert path.stat().st_size < 1 << 20
    return zipfile.ZipFile(path)


def test_wheel_holds_all_sources_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    expected = {f"cuflash/{name}" for name in sources("cuflash", ".py", ".typed") | {"py.typed"}}
    expected -= {name for name in expected if name.startswith("cuflash/reference/")}  # the tests' oracle
    expected |= {f"cuflash/cuda_src/{name}" for name in sources("cuda_src", ".py", ".cu", ".cuh")}
    expected |= {f"cuflash/examples/{name}" for name in sources("examples", ".py", ".cu") if "/" not in name}
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == expected


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Version"] == cuflash.__version__ == importlib.metadata.version("cuflash")
    assert "attention_vjp" in metadata.get_payload()
    # The package's page names each package of the wheel, and no address, as the project has none.
    packages = {name.split("/")[1] for name in wheel.namelist() if name.startswith(("cuflash/cuda_src", "cuflash/ex"))}
    assert all(f"`cuflash.{name}`" in metadata.get_payload() for name in packages)
    assert metadata.get_all("Project-URL") is None
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [line.partition(">")[0] for line in required] == ["numpy"]
    assert {"cuda12", "cuda13", "bf16", "demo", "bench", "test"} <= set(metadata.get_all("Provides-Extra", []))


def test_installed_package_has_its_data() -> None:
    assert importlib.resources.files("cuflash").joinpath("py.typed").is_file()
    cuda = importlib.resources.files("cuflash.cuda_src")
    for name in sources("cuda_src", ".cu", ".cuh"):
        assert cuda.joinpath(name).is_file(), name


def test_public_names() -> None:
    assert set(cuflash.__all__) == PUBLIC
    for name in PUBLIC - {"__version__"}:
        assert getattr(cuflash, name).__doc__, name


def test_completion_shows_public_names_alone() -> None:
    """Also after everything behind them was used."""
    shown = python("""if True:
        import numpy as np
        import cuflash
        q = np.ones((1, 3, 2, 8), np.float32)
        cuflash.attention(q, q, q, block_mask=cuflash.BlockMask.sliding_window(3, 3, 1, 0))
        assert cuflash.distributed.shard and cuflash.offload.attention and cuflash.adapters
        assert cuflash.conversions.from_csr and cuflash.rules.explain
        for name in ("conversions", "distributed", "offload", "rules"):
            module = getattr(cuflash, name)
            assert sorted(module.__all__) == dir(module), name
        print(*dir(cuflash))
    """)
    assert set(shown.split()) == PUBLIC | {"adapters", "conversions", "distributed", "offload", "rules"}


def test_import_adds_less_than_50_ms_to_numpy(tmp_path: Path) -> None:
    # The processor's time is measured, as the wall clock counts whatever else the machine does.
    code = "import numpy, time; t = time.process_time(); import cuflash; print(time.process_time() - t)"
    # An installed package has its bytecode, which pip compiles; here the first run does, as a checkout may have none.
    env = {name: x for name, x in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(tmp_path)
    python(code, env)
    assert min(float(python(code, env)) for _ in range(7)) < 0.050


def test_works_without_cupy() -> None:
    python("""if True:
        import sys
        sys.modules["cupy"] = None  # an import of it fails
        import numpy as np
        import cuflash
        q = np.ones((1, 3, 2, 8), np.float32)
        out, backward = cuflash.attention_vjp(q, q, q, causal=True)
        assert np.allclose(out, 1)
        assert len(backward(out)) == 3
    """)


def test_numpy_arrays_import_no_gpu_library() -> None:
    loaded = python("""if True:
        import sys
        import numpy as np
        import cuflash
        q = np.ones((1, 3, 2, 8), np.float32)
        cuflash.attention(q, q, q)
        print(*sorted({"cupy", "torch", "jax", "ml_dtypes", "matplotlib"} & sys.modules.keys()))
    """)
    assert loaded.strip() == ""


def test_one_version_everywhere() -> None:
    """The module's is that of the citation and of the newest entry of the changelog."""
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {cuflash.__version__}\n" in citation
    assert changes.split("\n## ")[1].split()[0] == cuflash.__version__

"""Each header of cuda_src includes what it uses: none relies on what another file included before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import compiling
from compiling import needs_compiler

from cuflash import cuda_src, hardware
from cuflash.cuda import compile as cuda_compile
from cuflash.cuda import source
from cuflash.gpu import kernels
from cuflash.plan import entries
from cuflash.plan.config import KernelConfig
from cuflash.plan.listing import families as listing
from cuflash.plan.listing import sm90 as sm90_listing
from cuflash.plan.portable.tiles import OPERAND_ENTRIES

SOURCES = Path(cuda_src.__path__[0])


def configs() -> Iterator[KernelConfig]:
    """Yield a configuration of each kernel."""
    place = hardware.capability_of(compiling.HOPPER), hardware.smem_limit(compiling.HOPPER)
    found: dict[str, KernelConfig] = {}
    tables = listing.kernels((*sm90_listing.of_hopper(), *listing.of_fp8(*place), *listing.of_decode(*place)))
    for config in (*(x for x, _ in tables), *compiling.tables_of(compiling.HOPPER)):
        found.setdefault(config.entry, config)
    yield from found.values()
    yield from (compiling.reading_pages(found[name]) for name in compiling.PAGED)
    yield from (replace(found[OPERAND_ENTRIES[0]], entry=name) for name in OPERAND_ENTRIES)


def texts() -> Iterator[tuple[str, str]]:
    """Yield each header with its text, for a kernel that includes it, and with the constants of that kernel."""
    left = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.cuh")}
    for config in configs():
        paths = entries.file_of(config.entry)
        own, *bound = paths.split(" ")
        headers = kernels.headers_of(config.rules)
        text = source.inlined(paths if "." in own else f"{own}.cu", headers)
        left.discard(own)  # a kernel's own file comes first in every source
        for header in sorted(left):
            if f'#line 1 "cuda_src/{header}"' in text:
                left.discard(header)
                constants = source.constants_text({**kernels._SHARED, **kernels.constants_of(config)})
                yield header, constants + source.inlined(" ".join((header, *bound)), headers)
    # The kernels that split operands have the constants of any configuration, and these.
    own_constants = {"columns": 64, "threads": 256}
    of_split = {**kernels._SHARED, **kernels.constants_of(config), **own_constants}
    for header in ("split/channels.cuh", "split/source_row.cuh"):
        left.discard(header)
        yield header, source.constants_text(of_split) + source.inlined(header, headers)
    assert left == {"around/e4m3.cuh", "around/four.cuh"}  # kernels without a configuration include these
    for header in sorted(left):
        yield header, source.inlined(header)


@needs_compiler
def test_each_header_compiles_by_itself() -> None:
    """All are one text, each in a namespace of its own, where it meets nothing of the others."""
    pieces = (f"namespace header_{i} {{\n{text}\n}}\n" for i, (_, text) in enumerate(texts()))
    report = cuda_compile.compile_for(
        compiling.HOPPER, source.source_of("offset_of.cuh", {}) + "".join(pieces), "headers"
    )
    assert not report.spill_bytes

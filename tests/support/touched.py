"""A plugin of pytest that writes what the collected tests touch: each test's values, and what records of tables are.

``python -m pytest --collect-only -p touched``, with CUFLASH_TEST_TOUCHED for the file's name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import tiers

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write what tests touch, which tests belong to the whole suite alone, and the records."""
    of_tests: dict[str, set[str]] = {}
    records: set[str] = set()
    for item in session.items:
        of_tests.setdefault(item.nodeid.partition("[")[0], set()).update(values_of(item))
        records.update(of_records(item))
    found = {
        "tests": {test: sorted(values) for test, values in of_tests.items()},
        "whole": sorted({item.nodeid.partition("[")[0] for item in session.items if tiers.is_of_whole(item)}),
        "records": sorted(records),
    }
    Path(os.environ["CUFLASH_TEST_TOUCHED"]).write_text(json.dumps(found))


def values_of(item: pytest.Item) -> Iterator[str]:
    """Yield every value of every parameter but records, of which a test has hundreds."""
    callspec = getattr(item, "callspec", None)
    for name, x in callspec.params.items() if callspec is not None else ():
        if config_of(x) is None:
            yield f"{name}={_ADDRESS.sub('', repr(x))}"


def of_records(item: pytest.Item) -> Iterator[str]:
    """Yield family, dtype, options, head dims and architecture of the records among the parameters."""
    callspec = getattr(item, "callspec", None)
    for x in callspec.params.values() if callspec is not None else ():
        config = config_of(x)
        if config is not None:
            options = {name: value for name, value in asdict(config).items() if isinstance(value, bool | str)}
            dims = {"head_dim": config.head_dim, "head_dim_v": config.head_dim_v}
            own = {"dtype": x.dtype, "capability": x.capability, **dims}
            test = item.nodeid.partition("[")[0]
            yield from (f"{test} {config.entry}: {name}={value}" for name, value in {**options, **own}.items())


def config_of(x: Any) -> Any:
    """Return the record of a table that a parameter holds, or None."""
    config = getattr(x, "config", None)
    return config if is_dataclass(config) else None

"""Values become bytes between processes of one host, and come back as they do from text."""

from __future__ import annotations

import enum
import os
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from rank_values import VALUES, same

from cuflash.distributed import wire
from cuflash.distributed.packing import pack, unpack


@given(VALUES)
def test_values_are_those_of_the_text(value: Any) -> None:
    assert same(unpack(pack(value)), value)
    assert same(unpack(pack(value)), wire.decode(wire.encode(value)))
    assert same(unpack(memoryview(pack(value) + b"behind")), value)


class Text(str, enum.Enum):
    """A text that is more than one."""

    ONE = "one"


class Number(enum.IntEnum):
    """A number that is more than one."""

    TWO = 2


@pytest.mark.parametrize(
    "value",
    [
        (np.int64(3), [np.bool_(True)], {np.int8(1): np.float32(0.5)}, np.float64(0.1), np.uint64(2**64 - 1)),
        (Text.ONE, Number.TWO, np.str_("text"), np.bytes_(b"bytes"), float("inf"), "\udc80"),
        (os.stat_result(range(10)), OrderedDict(a=1), defaultdict(list, b=[()])),
        [wire.ArrayRef("gpu", 0, "<f4", (2, 3), (16, 4)), {"a": (wire.ArrayRef("host", 1, "|b1", ()),)}],
    ],
)
def test_other_values_are_those_of_the_text(value: Any) -> None:
    assert same(unpack(pack(value)), wire.decode(wire.encode(value)))


def test_a_place_that_is_met_twice() -> None:
    ref = wire.ArrayRef("gpu", 0, "<f4", (2, 3))
    first, (second,), other = unpack(pack((ref, [ref], wire.ArrayRef("gpu", 1, "<f4", ()))))
    assert first == ref and second is first and other.index == 1


@pytest.mark.parametrize("value", [object(), {1, 2}, np.ones(2), len, 1j, ..., bytearray(b"x"), frozenset(), compile])
def test_other_things_are_no_values(value: Any) -> None:
    for put in (value, [value], ("", value), {"key": value}):
        with pytest.raises(TypeError) as met:
            wire.encode(put)
        with pytest.raises(TypeError) as found:
            pack(put)
        assert str(found.value) == str(met.value)

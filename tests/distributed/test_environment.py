"""`from_environment` reads the environment, and values become text between processes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from cases import gaussian
from hypothesis import given
from rank_values import VALUES, same

from cuflash.distributed import wire
from cuflash.distributed.environment import is_launched, ranks_of

PLAIN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "29400"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
PMI = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("environ", "rank", "world", "local_rank", "host", "first_port"),
    [
        (PLAIN, 1, 4, 1, "node7", 29401),
        ({**PLAIN, "MASTER_PORT": "65530"}, 1, 4, 1, "node7", 65531),
        ({**PLAIN, "MASTER_PORT": "65535"}, 1, 4, 1, "node7", 65527),
        ({**PLAIN, "CUFLASH_PORT": "77"}, 1, 4, 1, "node7", 77),
        ({name: x for name, x in PLAIN.items() if name != "LOCAL_RANK"}, 1, 4, None, "node7", 29401),
        (OPEN_MPI, 3, 4, 1, "127.0.0.1", 29501),
        ({**OPEN_MPI, "MASTER_ADDR": "node7", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 3, 4, 1, "node7", 29501),
        (PMI, 0, 2, 0, "127.0.0.1", 29501),
        ({**PMI, "MASTER_PORT": "1000"}, 0, 2, 0, "127.0.0.1", 1001),
        # torchrun's agents are started by mpiexec, one on each host
        ({**PLAIN, "TORCHELASTIC_RUN_ID": "x", **PMI}, 1, 4, 1, "node7", 29401),
        # both say the same
        ({**PLAIN, "PMI_RANK": "1", "PMI_SIZE": "4"}, 1, 4, 1, "node7", 29401),
    ],
)
def test_launchers(
    environ: dict[str, str], rank: int, world: int, local_rank: int | None, host: str, first_port: int
) -> None:
    assert is_launched(environ)
    ranks = ranks_of(environ)
    assert (ranks.rank, ranks.world, ranks.local_rank, ranks.host) == (rank, world, local_rank, host)
    assert ranks.ports[0] == first_port
    assert all(0 < port < 65536 for port in ranks.ports)
    # torchrun's agent holds MASTER_PORT
    assert int(environ.get("MASTER_PORT", 29500)) not in ranks.ports


def test_nothing_in_the_environment_is_one_rank() -> None:
    assert not is_launched({"MASTER_ADDR": "node7"})
    assert ranks_of({"MASTER_ADDR": "node7"})[:2] == (0, 1)


def test_a_world_of_one_needs_no_address() -> None:
    assert ranks_of({"RANK": "0", "WORLD_SIZE": "1"})[:3] == (0, 1, None)


def without(name: str, environ: dict[str, str] = PLAIN) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key != name}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (without("RANK"), "RANK: expected a number, as WORLD_SIZE is set, got none"),
        (without("WORLD_SIZE"), "WORLD_SIZE: expected a number, as RANK is set, got none"),
        (without("MASTER_ADDR"), "MASTER_ADDR: expected the host of rank 0, as WORLD_SIZE is 4, got none"),
        ({**PLAIN, "MASTER_ADDR": ""}, "MASTER_ADDR: expected the host of rank 0, as WORLD_SIZE is 4, got none"),
        (without("MASTER_PORT"), "MASTER_PORT: expected a number, as WORLD_SIZE is 4, got none"),
        ({**PLAIN, "MASTER_PORT": "http"}, "MASTER_PORT: expected an integer from 1 to 65535, got 'http'"),
        ({**PLAIN, "MASTER_PORT": "70000"}, "MASTER_PORT: expected an integer from 1 to 65535, got 70000"),
        ({**PLAIN, "CUFLASH_PORT": "0"}, "CUFLASH_PORT: expected an integer from 1 to 65535, got 0"),
        ({**PLAIN, "RANK": "4"}, "RANK: expected an integer from 0 to 3, got 4"),
        ({**PLAIN, "RANK": "one"}, "RANK: expected an integer from 0 to 3, got 'one'"),
        ({**PLAIN, "WORLD_SIZE": "0"}, "WORLD_SIZE: expected an integer >= 1, got 0"),
        ({**PLAIN, "LOCAL_RANK": "-1"}, "LOCAL_RANK: expected an integer from 0 to 3, got -1"),
        (without("OMPI_COMM_WORLD_SIZE", OPEN_MPI), "OMPI_COMM_WORLD_SIZE: expected a number, as OMPI_COMM_WORLD_RANK"),
        (without("PMI_RANK", PMI), "PMI_RANK: expected a number, as PMI_SIZE is set, got none"),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "MASTER_ADDR: expected the host of rank 0, as OMPI_COMM_WORLD_SIZE is 4 and OMPI_COMM_WORLD_LOCAL",
        ),
        ({**PLAIN, **PMI}, "RANK, WORLD_SIZE: expected what PMI_RANK and PMI_SIZE say, 0 of 2, got 1 of 4"),
    ],
)
def test_what_is_missing_or_contradicts_itself(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        ranks_of(environ)


def test_tokens_tell_jobs_apart() -> None:
    tokens = {
        ranks_of({**PLAIN, **job}).token
        for job in ({}, {"CUFLASH_TOKEN": "a"}, {"TORCHELASTIC_RUN_ID": "a"}, {"PMIX_NAMESPACE": "a"})
    }
    # Both jobs look at neighbouring ports.
    tokens.add(ranks_of({**PLAIN, "MASTER_PORT": "29401"}).token)
    assert len(tokens) == 5
    assert ranks_of(PLAIN).token == ranks_of({**PLAIN, "RANK": "2", "LOCAL_RANK": "0"}).token


@given(VALUES)
def test_values_come_back(value: Any) -> None:
    assert same(wire.decode(wire.encode(value)), value)


def test_numbers_of_numpy_become_those_of_python() -> None:
    value = np.int64(3), np.bool_(True), np.float32(0.5), float("nan")
    found = wire.decode(wire.encode(value))
    assert same(found[:3], (3, True, 0.5))
    assert np.isnan(found[3])


@pytest.mark.parametrize("value", [object(), {1, 2}, np.ones(2), len, 1j])
def test_other_things_are_no_values(value: Any) -> None:
    with pytest.raises(TypeError, match="value: expected None, bools, numbers, strings, bytes"):
        wire.encode((value,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"call": "os.system"}', "expected a mark of this encoding, got 'call'"),
        (b"{}", "expected one mark, got 0"),
        (b'{"tuple": [], "bytes": ""}', "expected one mark, got 2"),
        (b"x", "Expecting value"),
    ],
)
def test_other_text_is_no_value(text: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wire.decode(text)


@pytest.mark.parametrize("dtype", ["bool", "int8", ">i4", "float16", "bfloat16", "float64", "complex64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (4, 6)])
def test_arrays_come_back(dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    of_kind = gaussian(rng, (), "bfloat16").dtype if dtype == "bfloat16" else np.dtype(dtype)
    x = gaussian(rng, shape, "float32").astype(of_kind)
    x = x[..., ::2] if shape else x
    message, host, gpu, refs = wire.detach([x, ("text", x)])
    assert not gpu and not refs
    sent = wire.decode(wire.encode(message))
    arrays = [wire.empty(ref) for ref in wire.refs_of(sent, wire.HOST)]
    for array, source in zip(arrays, host, strict=True):
        assert len(wire.bytes_of(source)) == array.nbytes
        wire.bytes_of(array)[:] = wire.bytes_of(source)
    first, (text, second) = wire.attach(sent, arrays, [])
    assert text == "text"
    for found in (first, second):
        assert found.dtype == x.dtype and found.shape == x.shape
        np.testing.assert_array_equal(found, x)

"""Attention over ranks that are processes gives the right results, and every rank says where one is wrong."""

from __future__ import annotations

import socket
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from rank_programs import Ended, free_port, launch, plain, run_all

from cuflash import distributed
from cuflash.distributed.order import ORDERS

SELFTEST = [sys.executable, "-m", "cuflash.distributed", "--selftest", "--device", "cpu", "--seqlen", "100"]


def errors_of(ended: list[Ended]) -> list[tuple[str, str]]:
    """Return (kind, text) of every rank's error."""
    return [(one.result["error"], one.result["text"]) for one in ended]


PROBLEMS: list[dict[str, Any]] = [
    *({"scheme": scheme, "order": order, "causal": True} for scheme in ("ring", "ulysses") for order in ORDERS),
    {"scheme": "ring", "order": "zigzag", "edges": [0, 5, 5, 30, 37], "window": [9, 0], "with_sink": True},
    {"scheme": "ulysses", "order": "plain", "edges": [0, 5, 5, 30, 37], "softcap": 3.0, "heads": [3, 1]},
    {"scheme": "ring", "order": "striped", "dropout_p": 0.3, "dropout_seed": 5},
    {"scheme": "grid", "order": "zigzag", "causal": True, "with_sink": True},
    {"scheme": "grid", "order": "striped", "edges": [0, 5, 5, 30, 37], "heads": [3, 1]},
]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_processes_together_are_one_device(world: int) -> None:
    for one in launch("attention", plain(world), {"problems": PROBLEMS}, time_limit=30):
        assert one.status == 0, one.printed + one.errors
        assert len(one.result) == len(PROBLEMS)
        for problem, errors in zip(PROBLEMS, one.result, strict=True):
            assert {"out", "lse", "dq", "dk", "dv"} <= errors.keys()
            assert ("extra 0" in errors) == bool(problem.get("with_sink"))
            assert max(errors.values()) < 1e-12, (problem, errors)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_messages_travel_both_ways_at_once(world: int) -> None:
    """Messages larger than any buffer of the system travel both ways."""
    ended = launch("messages", plain(world), {"megabytes": 24}, time_limit=30, check=False)
    for rank, one in enumerate(ended):
        assert one.result == {"local_rank": rank, "device": None, "transport": "tcp", "check": False}, one.errors


def test_a_process_alone_is_a_world_of_one() -> None:
    (one,) = launch("messages", [{}], {"megabytes": 1})
    assert one.result == {"local_rank": 0, "device": None, "transport": "tcp", "check": True}, one.errors


@pytest.mark.parametrize(
    "names",
    [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ],
)
def test_mpiexec_on_one_host_needs_no_address(names: tuple[str, str, str]) -> None:
    """Local ranks are counted where nothing names them."""
    rank_name, world_name, local_world = names
    port = str(free_port())
    variables = [{rank_name: str(n), world_name: "2", local_world: "2", "MASTER_PORT": port} for n in range(2)]
    for rank, one in enumerate(launch("messages", variables, {"megabytes": 1}, time_limit=30)):
        assert one.result["local_rank"] == rank


def test_a_port_that_is_taken_is_not_the_end() -> None:
    """The agent that holds MASTER_PORT may take a port, as may a program that answers something else on the next."""
    variables = plain(2)
    port = int(variables[0]["MASTER_PORT"])
    try:
        agent, other = (socket.create_server(("127.0.0.1", p)) for p in (port, port + 1))
    except OSError:
        pytest.skip("another program holds the port behind the one that was free")
    with agent, other:

        def answer() -> None:
            while True:
                try:
                    connection, _ = other.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        ended = launch("messages", variables, {"megabytes": 1}, time_limit=30)
        other.shutdown(socket.SHUT_RDWR)
    assert [one.status for one in ended] == [0, 0], [one.printed for one in ended]


def test_strangers_are_refused() -> None:
    """A connection without the token is neither read nor in the way."""
    variables = plain(2)
    port = int(variables[0]["MASTER_PORT"]) + 1
    refused = []

    def stranger() -> None:
        for _ in range(2):
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                try:
                    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                        connection.sendall(b"x" * 100)
                        while connection.recv(100):
                            pass
                        refused.append(True)
                        break
                except ConnectionResetError:
                    refused.append(True)
                    break
                except OSError:
                    time.sleep(0.01)

    thread = threading.Thread(target=stranger)
    thread.start()
    variables[1]["LATE"] = "1"
    ended = launch("messages", variables, {"megabytes": 1}, time_limit=30)
    thread.join()
    assert [one.status for one in ended] == [0, 0], [one.printed for one in ended]
    assert len(refused) == 2


def test_ranks_with_another_token_do_not_meet() -> None:
    variables = plain(2)
    variables[1]["CUFLASH_TOKEN"] = "other"
    first, second = errors_of(launch("messages", variables, {"megabytes": 1}, time_limit=1.5))
    assert first == ("TimeoutError", "rank 0: expected all 2 ranks within 1.5 s, got none of 1")
    assert second[0] == "TimeoutError"
    assert "rank 1: expected rank 0 at 127.0.0.1" in second[1] and "another token" in second[1]


def test_a_rank_that_comes_late_is_waited_for() -> None:
    for late in range(2):
        variables = plain(2)
        variables[late]["LATE"] = "1.5"
        ended = launch("messages", variables, {"megabytes": 1}, time_limit=30)
        assert [one.status for one in ended] == [0, 0], [one.printed for one in ended]


def test_a_rank_that_never_comes() -> None:
    first, second = errors_of(launch("messages", plain(3)[:2], {"megabytes": 1}, time_limit=1.5))
    assert first == second == ("TimeoutError", "rank 0: expected all 3 ranks within 1.5 s, got none of 2")


def test_a_first_rank_that_never_comes() -> None:
    (error,) = errors_of(launch("messages", plain(2)[1:], {"megabytes": 1}, time_limit=1.0))
    assert error[0] == "TimeoutError"
    assert error[1].startswith("rank 1: expected rank 0 at 127.0.0.1, ports ") and "within 1 s" in error[1]


def test_ranks_that_count_differently() -> None:
    variables = plain(2)
    variables[1]["WORLD_SIZE"] = "3"
    for error in errors_of(launch("messages", variables, {"megabytes": 1}, time_limit=30)):
        assert error == ("ValueError", "world: expected the same on every rank, got 2 on rank 0 and 3 on rank 1")


def test_a_rank_that_is_there_twice() -> None:
    variables = plain(3)
    variables[2]["RANK"] = "1"
    for error in errors_of(launch("messages", variables, {"megabytes": 1}, time_limit=30)):
        assert error == ("ValueError", "rank: expected each of 0 to 2 once, got 1 twice")


def test_a_rank_that_disagrees() -> None:
    for kind, text in errors_of(launch("disagree", plain(3), time_limit=30)):
        assert kind == "ValueError"
        assert "causal: expected the same on every rank, got False on rank 0 and True on rank 1" in text


def test_a_rank_that_is_killed_ends_the_waiting_at_once() -> None:
    first, killed, third = launch("die", plain(3), time_limit=60)
    assert killed.status == -9
    for one in (first, third):
        assert one.seconds < 30
        assert one.result["error"] == "RuntimeError"
        assert "rank 1 failed: its connection ended" in one.result["text"]


def test_a_rank_that_raises_ends_the_waiting_at_once() -> None:
    ended = launch("fail", plain(3), time_limit=60)
    first, second, third = errors_of(ended)
    assert second == ("MemoryError", "no memory left")
    assert first == third == ("RuntimeError", "rank 1 failed: MemoryError: no memory left")
    assert max(one.seconds for one in ended) < 30


def test_a_rank_that_does_not_call() -> None:
    first, second = launch("stay_away", plain(2), time_limit=0.7)
    assert errors_of([first]) == [
        ("TimeoutError", "rank 0: expected a message of rank 1 within 0.7 s, got none"),
    ]
    assert second.result is None


def test_a_rank_that_stands_still() -> None:
    first, second = launch("stop", plain(2), time_limit=1)
    assert errors_of([first]) == [("TimeoutError", "rank 0: expected a message of rank 1 within 1 s, got none")]
    assert second.result["error"] in ("RuntimeError", "TimeoutError")


def test_ranks_that_do_not_agree_how_arrays_travel() -> None:
    variables = plain(2)
    variables[1]["OPTIONS"] = '{"transport": "nccl"}'
    for error in errors_of(launch("messages", variables, {"megabytes": 1}, time_limit=30)):
        assert error == (
            "ValueError",
            "transport: expected the same on every rank, got auto on rank 0 and nccl on rank 1",
        )


def test_an_argument_that_one_rank_finds_wrong_is_an_error_on_all() -> None:
    variables = plain(2)
    variables[1]["OPTIONS"] = '{"device": 1000000}'
    first, second = errors_of(launch("messages", variables, {"megabytes": 1}, time_limit=30))
    assert second[0] == "ValueError" and second[1].startswith("device: expected the number of one of")
    assert first == ("RuntimeError", f"rank 1 failed: ValueError: {second[1]}")


def test_a_program_that_ends_is_missed_only_where_it_is_needed() -> None:
    first, second, third = launch("leave", plain(3), time_limit=60)
    assert second.status == 0
    for one in (first, third):
        assert one.result["error"] == "RuntimeError"
        assert "rank 1 failed: it closed its communicator, or its program ended" in one.result["text"]


def test_closed_communicators_say_so() -> None:
    for rank, one in enumerate(launch("closed", plain(2), time_limit=30)):
        assert one.result == [f"ValueError: rank {rank}: expected an open communicator, got one that was closed"] * 4


def test_what_does_not_travel() -> None:
    for one in launch("unfit", plain(2), time_limit=30):
        dtype, to, source, value = one.result
        assert dtype == "TypeError: message: expected arrays of numbers or bools, got dtype object"
        assert to == "ValueError: to: expected a rank from 0 to 1, got 2"
        assert source == "ValueError: source: expected a rank from 0 to 1, got -1"
        assert value.startswith("TypeError: value: expected None, bools, numbers, strings") and "object" in value


def test_selftest_of_processes() -> None:
    ended = run_all([SELFTEST] * 2, plain(2))
    assert [one.status for one in ended] == [0, 0], [one.errors for one in ended]
    assert not ended[1].printed
    printed = ended[0].printed
    assert "2 ranks, each a process with NumPy arrays, by tcp, 100 tokens" in printed
    assert "every rank computes what one device does" in printed
    for scheme in ("ring", "heads"):
        for order in ORDERS:
            assert any(line.split()[:2] == [scheme, order] for line in printed.splitlines())


def test_selftest_says_what_is_wrong() -> None:
    variables = plain(2)[0]
    del variables["MASTER_ADDR"]
    (one,) = run_all([SELFTEST], [variables])
    assert one.status == 2
    assert "ValueError: MASTER_ADDR: expected the host of rank 0, as WORLD_SIZE is 2, got none" in one.errors


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"time_limit": 0}, ValueError, "time_limit: expected more than 0 seconds, got 0"),
        ({"time_limit": "1"}, TypeError, "time_limit: expected seconds, got str"),
        ({"check": "no"}, TypeError, "check: expected a bool, got str"),
        ({"transport": "udp"}, ValueError, "transport: expected one of auto, ipc, nccl, got 'udp'"),
        ({"device": "gpu"}, TypeError, "device: expected an integer, \"auto\" or None, got 'gpu'"),
        ({"device": True}, TypeError, 'device: expected an integer, "auto" or None, got True'),
        ({"device": 10**6}, ValueError, "device: expected the number of one of"),
    ],
)
def test_arguments(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        distributed.from_environment(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_processes_with_a_gpu_each(transport: str) -> None:
    """Ring and heads agree in both passes with one GPU; every rank's table of errors is printed."""
    import cupy

    gpus = cupy.cuda.runtime.getDeviceCount()
    if gpus < 2:
        pytest.skip(f"one GPU here: {transport} between processes needs two")
    shape = {"seqlen": 1000, "heads": [8, 2], "dims": [64, 64], "causal": True}
    problems = [
        {"scheme": scheme, "order": order, "dtype": dtype, **shape}
        for scheme in ("ring", "ulysses")
        for order in ORDERS
        for dtype in ("float32", "float16")
    ]
    for world in {2, min(4, gpus)}:
        ended = launch(
            "attention", plain(world), {"problems": problems}, time_limit=120, device="auto", transport=transport
        )
        for rank, one in enumerate(ended):
            print(f"rank {rank} of {world}, {transport}: status {one.status}\n{one.printed}\n{one.errors}")
        for one in ended:
            assert one.status == 0
            for problem, errors in zip(problems, one.result, strict=True):
                limit = 1e-4 if problem["dtype"] == "float32" else 2e-2
                assert np.max(list(errors.values())) < limit, (problem, errors)

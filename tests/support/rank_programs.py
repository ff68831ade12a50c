"""Ranks as processes, which `launch` starts, and each of which runs one of the programs below (tests/distributed).

A program gets its communicator and its process's argument, and returns what it prints as JSON. An exception is printed
as ``{"error": kind, "text": text}``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

Array = Any
# A launcher that the tests themselves run under may have set these variables.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "OMPI_", "PMI", "TORCHELASTIC")
SECONDS = 300  # a process is stopped after these, which are far more than any takes


class Ended(NamedTuple):
    """The end of a process."""

    status: int
    printed: str
    errors: str
    seconds: float

    @property
    def result(self) -> Any:
        """Return what its program returned; the test fails with its errors where there is nothing."""
        lines = self.printed.splitlines()
        assert lines, f"expected a line of JSON, got nothing, status {self.status} and:\n{self.errors}"
        return json.loads(lines[-1])


def free_port() -> int:
    """Return a port that is free, as some behind it most likely are, too."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without a launcher's variables, and with some more."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    path = os.pathsep.join(p for p in sys.path if p)
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}


def plain(world: int, port: int | None = None) -> list[dict[str, str]]:
    """Return variables for each rank of this host."""
    port = free_port() if port is None else port
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def launch(
    program: str,
    variables: Sequence[Mapping[str, str]],
    arguments: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[Ended]:
    """Run a program in a process for each set of variables; `options` are those of `from_environment`."""
    text = json.dumps({"arguments": dict(arguments or {}), "options": {"device": None, **options}})
    command = [sys.executable, __file__, program, text]
    return run_all([command] * len(variables), variables)


def run_all(commands: Sequence[Sequence[str]], variables: Sequence[Mapping[str, str]]) -> list[Ended]:
    """Run commands at once, and wait for all."""
    start = time.monotonic()
    token = {"CUFLASH_TOKEN": os.urandom(8).hex()}  # tells this test from others on neighbouring ports
    processes = [
        subprocess.Popen(
            command,
            env=environment(**{**token, **own}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        for command, own in zip(commands, variables, strict=True)
    ]
    ended = []
    try:
        for process in processes:
            printed, errors = process.communicate(timeout=SECONDS)
            ended.append(Ended(process.returncode, printed, errors, time.monotonic() - start))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return ended


# Programs.


def attention(comm: Any, problems: list[dict[str, Any]]) -> Any:
    """Return the largest errors of results and gradients against one device's, for each problem and name."""
    return [errors_beside_one_device(comm, **problem) for problem in problems]


def errors_beside_one_device(
    comm: Any,
    scheme: str,
    order: str,
    seqlen: int = 37,
    heads: Sequence[int] = (4, 2),
    dims: Sequence[int] = (8, 5),
    dtype: str = "float64",
    edges: Sequence[int] | None = None,
    with_sink: bool = False,
    **options: Any,
) -> dict[str, float]:
    """Return errors relative to the largest value of each result; every rank compares the whole."""
    import cuflash
    from cuflash import distributed, interop

    xp = np
    if comm.device is not None:
        import cupy

        xp = cupy
    axis = 1 if edges is None else 0
    lead = (2,) if edges is None else ()
    rng = np.random.default_rng(3)
    shapes = {"q": (heads[0], dims[0]), "k": (heads[1], dims[0]), "v": (heads[1], dims[1]), "dout": (heads[0], dims[1])}
    wide = {name: rng.standard_normal((*lead, seqlen, *shape)) for name, shape in shapes.items()}
    whole = {name: xp.asarray(x.astype(np.float32)).astype(interop.dtype_of(dtype)) for name, x in wide.items()}
    if with_sink:
        options["sink"] = xp.linspace(-1, 1, heads[0]).astype("float64" if dtype == "float64" else "float32")
    q, k, v, dout = whole.values()
    if edges is None:
        (out, lse), backward = cuflash.attention_vjp(q, k, v, return_lse=True, **options)
    else:
        where = xp.asarray(edges, np.int32)
        (out, lse), backward = cuflash.attention_varlen_vjp(q, k, v, where, where, return_lse=True, **options)
        options["cu_seqlens"] = np.asarray(edges, np.int32)
    expected = [out, lse, *backward(dout)]
    dealing = 2 if comm.world % 2 == 0 else comm.world
    makes: dict[str, Any] = {
        "ring": distributed.ring_attention_vjp,
        "ulysses": distributed.ulysses_attention_vjp,
        "grid": partial(distributed.ring_attention_vjp, heads=dealing),
    }
    make = makes[scheme]
    parts = [distributed.shard(x, comm, order, axis) for x in whole.values()]
    q, k, v, dout = parts
    (out, lse), backward = make(q, k, v, comm, order=order, return_lse=True, **options)
    dq, dk, dv, *extras = backward(dout)
    axes = {"out": axis, "lse": -1, "dq": axis, "dk": axis, "dv": axis}
    found = [
        distributed.unshard(x, comm, order, at) for x, at in zip((out, lse, dq, dk, dv), axes.values(), strict=True)
    ]
    names = [*axes, *(f"extra {n}" for n in range(len(extras)))]
    errors = {}
    for name, x, y in zip(names, [*found, *extras], expected, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape, name
        x, y = (z.astype(np.float64) for z in (x, y))
        errors[name] = float(abs(x - y).max() / max(1.0, float(abs(y).max())))
    return errors


def messages(comm: Any, megabytes: int) -> Any:
    """Send much to every rank before any receives; then send messages of all sorts around."""
    to, source = (comm.rank + 1) % comm.world, (comm.rank - 1) % comm.world
    large = [np.full(megabytes << 20, 16 * comm.rank + rank, np.uint8) for rank in range(comm.world)]
    came = comm.exchange(large)
    assert all((x == 16 * rank + comm.rank).all() and x.size == megabytes << 20 for rank, x in enumerate(came))
    several = (np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2], [np.zeros((0, 3), bool), None, "text", (1, 2.5)])
    comm.send((*several, np.full((), 7, np.float32)), to)
    comm.send("second", to)
    comm.send("own", comm.rank)
    swapped, rest, scalar = comm.receive(source)
    assert swapped.tolist() == [[0, 2], [3, 5]] and swapped.dtype == np.dtype(">i4")
    assert rest[0].shape == (0, 3) and rest[0].dtype == bool and rest[1:] == [None, "text", (1, 2.5)]
    assert float(scalar) == 7 and np.shape(scalar) == ()
    assert comm.receive(source) == "second" and comm.receive(comm.rank) == "own"
    value = ("a", None, True, -(2**70), 0.1, float("inf"), b"\0\xff", [(), {"b": (1,)}])
    assert comm.all_gather((comm.rank, value)) == [(rank, value) for rank in range(comm.world)]
    assert comm.sum(np.array([comm.rank + 0.5])).tolist() == [sum(range(comm.world)) + comm.world / 2]
    comm.barrier()
    return {"local_rank": comm.local_rank, "device": comm.device, "transport": comm.transport, "check": comm.check}


def disagree(comm: Any) -> Any:
    """Let one rank make another call than the others."""
    return ring(comm, causal=comm.rank == 1)


def die(comm: Any) -> Any:
    """Kill one rank while the others are in a call, once all are there."""
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return ring(comm)


def fail(comm: Any) -> Any:
    """Let one rank raise in the middle of a call."""
    from cuflash.frontend import partial

    def forward(part: Any, **options: Any) -> Any:
        raise MemoryError("no memory left")

    if comm.rank == 1:
        setattr(partial.Part, "forward", forward)  # noqa: B010, as mypy knows no method that changes
    return ring(comm)


def stay_away(comm: Any) -> Any:
    """Let one rank be there without calling."""
    if comm.rank == 1:
        time.sleep(2)
        return None
    return ring(comm)


def stop(comm: Any) -> Any:
    """Let one rank's whole process stand still for a while, in which it takes nothing of the much sent to it."""
    comm.barrier()
    if comm.rank == 1:
        own = os.getpid()
        subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {own}"])
        os.kill(own, signal.SIGSTOP)
    comm.exchange([np.zeros(32 << 20, np.uint8)] * comm.world)


def hammer(comm: Any, count: int) -> Any:
    """Send all ranks messages of all sizes with two tags, take those of the second tag first, and gather in between."""
    rng = np.random.default_rng(7)
    sizes = [int(size) for size in rng.choice([0, 10, 1000, 5000, 50_000], count)]
    others = [rank for rank in range(comm.world) if rank != comm.rank]
    for n, size in enumerate(sizes):
        for to in others:
            comm.send((n, np.full(size, n % 100, np.int8), "x" * (size // 2)), to, n % 2)
        if n % 10 == 0:
            assert comm.all_gather((comm.rank, n)) == [(rank, n) for rank in range(comm.world)]
    for tag in (1, 0):
        for n in range(tag, count, 2):
            for source in others:
                number, x, text = comm.receive(source, tag)
                assert number == n and x.size == sizes[n] and (x == n % 100).all() and len(text) == sizes[n] // 2
    for n in range(5 * count):
        assert comm.all_gather(n) == [n] * comm.world
    comm.barrier()
    return comm._link.mailboxes is not comm._mesh


def die_in_the_middle(comm: Any, full: bool) -> Any:
    """Kill one rank, for which the other one waits, or to which it sends without an end."""
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    if full:
        for _ in range(2000):
            comm.send(b"x" * 100, 1)
    comm.receive(1)


def leave(comm: Any) -> Any:
    """Let one rank's program end without a call; what it sent before arrives."""
    comm.send(np.ones(1 << 20), (comm.rank + 1) % comm.world)
    if comm.rank == 1:
        return None
    assert comm.receive((comm.rank - 1) % comm.world).sum() == 1 << 20
    return ring(comm)


def closed(comm: Any) -> Any:
    """Return what a closed communicator says to each call."""
    comm.barrier()
    comm.close()
    comm.close()
    calls = (comm.barrier, lambda: comm.send(None, 0), lambda: comm.receive(0), lambda: comm.all_gather(1))
    return [message_of(call) for call in calls]


def unfit(comm: Any) -> Any:
    """Return the errors of values and arrays that do not travel."""
    calls: list[Callable[[], Any]] = [
        lambda: comm.send(np.array([object()]), 1 - comm.rank),
        lambda: comm.send(None, 2),
        lambda: comm.receive(-1),
        lambda: comm.all_gather(object()),
    ]
    return [message_of(call) for call in calls]


def message_of(call: Callable[[], Any]) -> str:
    """Return the kind and the text of what a call raises."""
    try:
        call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def ring(comm: Any, **options: Any) -> None:
    """Make a small call."""
    from cuflash import distributed

    x = np.ones((1, 4, 2, 8), np.float32)
    distributed.ring_attention(x, x, x, comm, **options)


def main() -> int:
    """Run a program over `from_environment`, print its result or its error."""
    from cuflash import distributed

    name, text = sys.argv[1:]
    given = json.loads(text)
    try:
        late = float(os.environ.get("LATE", 0))
        time.sleep(late)
        options = {**given["options"], **json.loads(os.environ.get("OPTIONS", "{}"))}
        result = globals()[name](distributed.from_environment(**options), **given["arguments"])
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"error": type(error).__name__, "text": str(error)}))
        return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

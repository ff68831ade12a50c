"""The communicator of a process that is a rank, by the variables of torchrun, mpiexec or the user."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Literal, NamedTuple

import numpy as np

from cuflash.distributed.communicators import DEFAULT_TIME_LIMIT
from cuflash.distributed.hosts import host_name
from cuflash.distributed.mesh import Mesh
from cuflash.distributed.processes import TRANSPORTS, ProcessCommunicator, choose_link
from cuflash.distributed.rendezvous import Meeting, meet
from cuflash.problem.checks import check_bool

DEFAULT_MASTER_PORT = 29500  # torchrun's, for launchers that name none
# Rank 0 takes the first free one of so many ports behind MASTER_PORT, on which torchrun's agent may listen itself.
NUM_PORTS = 8
LAST_PORT = 65535
# These variables tell jobs apart that look for each other on the same ports.
JOB_NAMES = (
    "MASTER_PORT",
    "CUFLASH_PORT",
    "TORCHELASTIC_RUN_ID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "SLURM_JOB_ID",
)


class Launcher(NamedTuple):
    """The names under which a launcher says who a process is."""

    rank: str
    world: str
    local_rank: str
    local_world: str


PLAIN = Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
LAUNCHERS = (
    PLAIN,
    Launcher(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    ),
    Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


class Ranks(NamedTuple):
    """The ranks as the environment describes them."""

    rank: int
    world: int
    local_rank: int | None  # None where the hosts' names have to tell
    host: str  # where rank 0 listens
    ports: tuple[int, ...]
    token: bytes


def from_environment(
    *,
    time_limit: float = DEFAULT_TIME_LIMIT,
    check: bool = True,
    transport: Literal["auto", "ipc", "nccl"] = "auto",
    device: int | Literal["auto"] | None = "auto",
) -> ProcessCommunicator:
    """Return the communicator of a process that is one of several ranks. Every rank calls this.

    It reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun sets, and LOCAL_RANK where there is one; or
    what mpiexec sets (OMPI_COMM_WORLD_RANK and its kin, or PMI_RANK and its kin), with MASTER_ADDR where the ranks are
    on several hosts. Where nothing names a rank, this process is the only one.

    Rank 0 listens on MASTER_ADDR, on the first free one of the eight ports behind MASTER_PORT (29500 where mpiexec is
    without one), or on CUFLASH_PORT alone. Both ends of a connection prove that they know a token, made of these ports,
    of the job's name and, where that is set, of the secret CUFLASH_TOKEN; what travels is not encrypted.

    Parameters
    ----------
    time_limit : float
        Seconds that this call waits for the other ranks, and later a rank for another one, before it raises
        TimeoutError.
    check : bool
        Whether the arguments of every call are compared over the ranks.
    transport : {"auto", "ipc", "nccl"}
        What carries CuPy arrays: copy engines between processes of one host, NCCL (the package nvidia-nccl-cu13 or
        nvidia-nccl-cu12), or by "auto" the former where they work between all ranks, else the latter.
    device : int, "auto" or None
        This rank's GPU, which is made the current one of the calling thread. "auto": the one whose number is the local
        rank (modulo their number, for launchers that show each rank its own), and none where CuPy finds no GPU. None:
        arrays are NumPy's, which travel over TCP and, small ones within a host, through shared memory.

    Returns
    -------
    ProcessCommunicator
        A `Communicator` that also has the attributes local_rank, device and transport ("tcp", "ipc" or "nccl").

    Raises
    ------
    TypeError
        For an argument of a wrong kind.
    ValueError
        Where the environment lacks something or contradicts itself, or the ranks disagree.
    TimeoutError
        Where another rank does not come.
    OSError
        Where rank 0 finds no free port.
    RuntimeError
        Where a rank fails meanwhile, or no transport works.

    Examples
    --------
    >>> import cuflash
    >>> comm = cuflash.distributed.from_environment(device=None)  # torchrun --nproc-per-node 4 has a world of 4
    >>> comm.rank, comm.world
    (0, 1)
    >>> comm.close()
    """
    time_limit = _check_time_limit(time_limit)
    check = check_bool("check", check)
    if transport not in TRANSPORTS:
        raise ValueError(f"transport: expected one of {', '.join(TRANSPORTS)}, got {transport!r}")
    is_number = isinstance(device, (int, np.integer)) and not isinstance(device, bool)
    if not (device is None or device == "auto" or is_number):
        raise TypeError(f'device: expected an integer, "auto" or None, got {device!r}')
    ranks = ranks_of(os.environ)
    connections = meet(Meeting(ranks.host, ranks.ports, ranks.token, ranks.rank, ranks.world, time_limit))
    mesh = Mesh(ranks.rank, ranks.world, connections, time_limit)
    with ExitStack() as undo:
        undo.callback(mesh.close)
        try:
            hosts = mesh.gather(host_name())
            local_rank = ranks.local_rank
            if local_rank is None:
                local_rank = hosts[: ranks.rank].count(hosts[ranks.rank])
            number = _use_device(device, local_rank)
            link, name = choose_link(mesh, number, transport)
        except Exception as error:
            mesh.fail(error)
            raise
        undo.pop_all()
    return ProcessCommunicator(mesh, link, name, local_rank=local_rank, device=number, check=check)


def is_launched(environ: Mapping[str, str]) -> bool:
    """Return True if the environment names this process's rank."""
    return any(name in environ for launcher in LAUNCHERS for name in (launcher.rank, launcher.world))


def ranks_of(environ: Mapping[str, str]) -> Ranks:
    """Read from the environment which rank this process is, and where the others are.

    Raises
    ------
    ValueError
        Where a variable is missing, is no such number, or two launchers say different things.
    """
    named = [launcher for launcher in LAUNCHERS if launcher.rank in environ or launcher.world in environ]
    if not named:
        return Ranks(0, 1, None, "127.0.0.1", (), b"")
    launcher = named[0]
    rank, world = _numbers(environ, launcher)
    # torchrun's own agents may be ranks of mpiexec, whose variables are then those of the agents.
    if "TORCHELASTIC_RUN_ID" not in environ:
        for other in named[1:]:
            if _numbers(environ, other) != (rank, world):
                raise ValueError(
                    f"{launcher.rank}, {launcher.world}: expected what {other.rank} and {other.world} say, "
                    f"{' of '.join(map(str, _numbers(environ, other)))}, got {rank} of {world}"
                )
    local_rank = _integer(environ, launcher.local_rank, 0, world - 1) if launcher.local_rank in environ else None
    if world == 1:
        return Ranks(rank, world, local_rank, "127.0.0.1", (), b"")
    is_one_host = environ.get(launcher.local_world) == environ[launcher.world]
    host = environ.get("MASTER_ADDR", "")
    if not host and launcher is PLAIN:
        raise ValueError(f"MASTER_ADDR: expected the host of rank 0, as {launcher.world} is {world}, got none")
    if not host and not is_one_host:
        raise ValueError(
            f"MASTER_ADDR: expected the host of rank 0, as {launcher.world} is {world} and {launcher.local_world} does "
            "not say that all share a host, got none"
        )
    return Ranks(rank, world, local_rank, host or "127.0.0.1", _ports(environ, launcher), _token(environ))


def num_gpus() -> int:
    """Count the GPUs that CuPy finds; 0 without CuPy."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount()) if cupy.cuda.is_available() else 0
    except ImportError:
        return 0


def _numbers(environ: Mapping[str, str], launcher: Launcher) -> tuple[int, int]:
    for name, beside in ((launcher.rank, launcher.world), (launcher.world, launcher.rank)):
        if name not in environ:
            raise ValueError(f"{name}: expected a number, as {beside} is set, got none")
    world = _integer(environ, launcher.world, 1, None)
    return _integer(environ, launcher.rank, 0, world - 1), world


def _integer(environ: Mapping[str, str], name: str, least: int, most: int | None) -> int:
    bounds = f"an integer >= {least}" if most is None else f"an integer from {least} to {most}"
    try:
        value = int(environ[name])
    except ValueError:
        raise ValueError(f"{name}: expected {bounds}, got {environ[name]!r}") from None
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name}: expected {bounds}, got {value}")
    return value


def _ports(environ: Mapping[str, str], launcher: Launcher) -> tuple[int, ...]:
    if "CUFLASH_PORT" in environ:
        return (_integer(environ, "CUFLASH_PORT", 1, LAST_PORT),)
    if "MASTER_PORT" in environ:
        port = _integer(environ, "MASTER_PORT", 1, LAST_PORT)
    elif launcher is PLAIN:
        raise ValueError(f"MASTER_PORT: expected a number, as {launcher.world} is {environ[launcher.world]}, got none")
    else:
        port = DEFAULT_MASTER_PORT
    # There is no port behind the last one, so that ports below it serve, too.
    behind = range(port + 1, min(port + NUM_PORTS, LAST_PORT) + 1)
    return tuple(behind) or tuple(range(port - NUM_PORTS, port))


def _token(environ: Mapping[str, str]) -> bytes:
    """Return the token that only this job's ranks know or, without a secret, that tells the job from others."""
    parts = [environ.get(name, "") for name in ("CUFLASH_TOKEN", *JOB_NAMES)]
    return hashlib.sha256("\0".join(("cuflash", *parts)).encode()).digest()


def _use_device(device: int | str | None, local_rank: int) -> int | None:
    """Make this rank's GPU the current one, and return its number."""
    if device is None:
        return None
    count = num_gpus()
    if device == "auto":
        if not count:
            return None
        number = local_rank % count
    else:
        number = int(device)
        if not 0 <= number < count:
            raise ValueError(f"device: expected the number of one of {count} GPUs, got {number}")
    import cupy

    cupy.cuda.Device(number).use()
    return number


def _check_time_limit(time_limit: float) -> float:
    if not isinstance(time_limit, (int, float)) or isinstance(time_limit, bool):
        raise TypeError(f"time_limit: expected seconds, got {type(time_limit).__name__}")
    if not time_limit > 0:
        raise ValueError(f"time_limit: expected more than 0 seconds, got {time_limit}")
    return float(time_limit)

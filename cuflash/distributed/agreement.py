"""Every rank must make the same call, so arguments are compared before anything else travels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from cuflash.distributed.communicators import Communicator
from cuflash.distributed.steps import Steps
from cuflash.problem.fp8 import SCALES
from cuflash.problem.options import Options, check_names

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")
Described = tuple[tuple[str, Any], ...]

# These options index the whole score matrix, of which no rank holds more than a part.
NOT_SPREAD = ("bias", "mask", "q_lengths", "kv_lengths", "block_mask", "block_table")


def check_options(keywords: Mapping[str, Any]) -> Options:
    """Return the options of a call; NotImplementedError for those that no rank could apply to its part."""
    check_names(keywords)
    for name in NOT_SPREAD:
        if keywords.get(name) is not None:
            raise NotImplementedError(
                f"{name}: expected None, as no rank holds the whole of it; causal, window, softcap, alibi_slopes, "
                "sink, dropout and cu_seqlens work over ranks"
            )
    for name in (*SCALES, "out_dtype"):
        if keywords.get(name) is not None:
            raise NotImplementedError(
                f"{name}: expected None, as attention over ranks takes no FP8 arrays and gives results of q's dtype"
            )
    return Options(**keywords)


def describe(name: str, value: Any) -> tuple[str, Any]:
    """Return what ranks compare of an option: shapes and dtypes of arrays, the name of a function, else the text."""
    if isinstance(value, tuple) and all(hasattr(x, "shape") and hasattr(x, "dtype") for x in value):
        return name, tuple([(tuple(x.shape), str(x.dtype)) for x in value])
    if callable(value):
        return name, f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return name, (tuple(value.shape), str(value.dtype))
    return name, repr(value)


@dataclass(frozen=True)
class Proposal(Generic[T]):
    """A call as one rank has found it, before the others have told theirs."""

    prepared: T | None  # what the call goes on with; None where it is invalid
    described: Described  # what is to be the same on all ranks; the entry called "length" is this rank's own
    error: Exception | None = None
    digest: str = ""  # of what is described


def propose(comm: Communicator, prepare: Callable[[], tuple[T, Described]]) -> Proposal[T]:
    """Check this rank's arguments by `prepare`, which returns what the call goes on with and what is compared."""
    try:
        prepared, described = prepare()
    except Exception as error:
        if not comm.check:
            raise
        return Proposal(None, (), error)
    return Proposal(prepared, described, None, digest_of(described) if comm.check else "")


def agree(comm: Communicator, proposal: Proposal[T]) -> Steps[tuple[T, list[Any]]]:
    """Check a call on every rank; where one finds it invalid, or two disagree, every rank raises.

    Returns
    -------
    (what was prepared, the lengths of all ranks)

    Raises
    ------
    ValueError
        On every rank, where only some find the call invalid, or where arguments differ; it names rank and argument.
    Exception
        What `propose` met, where it did so on every rank.
    """
    error, described = proposal.error, proposal.described
    own = None if error is None else f"{type(error).__name__}: {error}"
    told = yield from comm.gathering((own, dict(described).get("length"), proposal.digest))
    failures = [(rank, text) for rank, (text, *_) in enumerate(told) if text is not None]
    if len(failures) == comm.world and error is not None:
        raise error
    if failures:
        rank, text = failures[0]
        raise ValueError(f"rank {rank} of {comm.world} finds the call invalid: {text}") from error
    if len({digest for *_, digest in told}) > 1:
        _compare((yield from comm.gathering(described)))
    assert proposal.prepared is not None
    return proposal.prepared, [length for _, length, _ in told]


def digest_of(described: Described) -> str:
    """Return a text that equal calls have in common, which ranks tell each other where nothing is wrong."""
    entries = [entry for entry in described if entry[0] != "length"]
    return hashlib.blake2b(repr(entries).encode(), digest_size=16).hexdigest()


def _compare(told: list[Described]) -> None:
    first = dict(told[0])
    for rank, described in enumerate(told):
        its = dict(described)
        for name in dict.fromkeys((*first, *its)):
            if name != "length" and first.get(name) != its.get(name):
                raise ValueError(
                    f"{name}: expected the same on every rank, got {first.get(name)} on rank 0 and {its.get(name)} on "
                    f"rank {rank}"
                )


@contextmanager
def telling(comm: Communicator) -> Iterator[None]:
    """Let a failure of this rank end the others' waiting within the context, in which ranks depend on each other."""
    try:
        yield
    except GeneratorExit:  # nobody takes the steps any more
        raise
    except BaseException as error:
        comm.fail(error)
        raise

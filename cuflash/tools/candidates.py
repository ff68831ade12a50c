"""The candidates of both passes over a problem on a GPU, as calls find them, and what is known of each.

A rehearsal of a pass (`gpu.ahead`) notes the candidates, so that families are asked as in calls; it runs nothing, and
the GPU may be one that is not here. For Hopper's plain forward pass the plan compares tiles and splits of the keys
before, by times in microseconds; these are candidates, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np

from cuflash.cuda import device as cuda_device
from cuflash.cuda import refusals
from cuflash.cuda.device import Device
from cuflash.gpu import backend
from cuflash.gpu.ahead import Rehearsal
from cuflash.gpu.kernels import source_of
from cuflash.gpu.launch import Kernel, Work
from cuflash.gpu.trial import Place
from cuflash.hardware import ALIGNMENT, capability_of, num_sms, smem_limit
from cuflash.plan.config import KernelConfig
from cuflash.plan.decode import kernels as decode
from cuflash.plan.decode.kernels import DecodeConfig
from cuflash.plan.entries import file_of
from cuflash.plan.record import Record
from cuflash.plan.sm80 import times as sm80_times
from cuflash.plan.sm80.backward import Sm80BackwardConfig
from cuflash.plan.sm80.forward import Sm80QueryConfig
from cuflash.plan.sm80.kinds import PARTS_OF
from cuflash.plan.sm90 import few_queries as sm90_few_queries
from cuflash.plan.sm90 import forward as sm90_forward
from cuflash.plan.sm90 import grid as sm90_grid
from cuflash.plan.sm90 import times as sm90_times
from cuflash.plan.sm90.config import Sm90ForwardConfig
from cuflash.problem.attention_problem import Array, AttentionProblem
from cuflash.problem.operands import Operands
from cuflash.tools import problems

FORWARD, BACKWARD = "forward", "backward"
DIRECTIONS = FORWARD, BACKWARD
# These fields of configurations follow from others, or are the problem's.
_NO_DETAILS = ("smem_bytes", "rules")
# Families by parts of the paths of their files, the first that is found.
_FAMILIES = {
    "split/sm90": "wgmma on float16 parts",
    "sm90/": "wgmma",
    "split/sm80": "mma.sync on float16 parts",
    "sm80/wide": "mma.sync on float64",
    "sm80/": "mma.sync",
    "decode/": "mma.sync over a cache",
    "portable/": "portable",
}


@dataclass(frozen=True)
class Gpu:
    """A GPU that may not be here, with what plans ask of one (see `cuda.device.Device`)."""

    arch: str
    capability: tuple[int, int]
    smem_limit: int
    num_sms: int
    has_wgmma: bool
    name: str = ""
    compiler: str = ""  # empty where nothing can be compiled for it and run
    offset: int = 0  # of all addresses from multiples of 16 bytes
    namespace: ModuleType = np

    def pointer(self, x: Array) -> int:
        """Return an address."""
        return self.offset

    def stream(self) -> int:
        """Return the default stream."""
        return 0

    def capture(self, stream: int) -> int:
        """Return 0, as there are no graphs."""
        return 0

    def load(self, *_: Any) -> _Nothing:
        """Return a kernel that nobody may launch, for launches that are made as they are rehearsed."""
        return _Nothing()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an array that nobody may read."""
        return problems.stand_in("", shape, np.dtype(dtype).name)


class _Nothing:
    """A kernel that was not compiled."""

    local_bytes = 0

    def bound(self, *_: Any, **__: Any) -> None:
        """Return None, as nothing is launched."""


def gpu_of(arch: str, aligned: bool = True) -> Gpu:
    """Return the usual card of an architecture."""
    offset = 0 if aligned else ALIGNMENT // 2
    return Gpu(arch, capability_of(arch), smem_limit(arch), num_sms(arch), arch == "sm_90a", offset=offset)


def device_here() -> Device | None:
    """Return the GPU that calls on new arrays use; None where CuPy, NVRTC or a GPU is missing."""
    try:
        import cupy

        cupy.cuda.nvrtc.getVersion()
        return cuda_device.device_of(cupy.empty(0)) if cupy.cuda.is_available() else None
    except Exception:  # whatever CuPy raises where a library cannot be loaded; `info.missing` says what
        return None


def gpu_here(device: Device, aligned: bool = True) -> Gpu:
    """Return what plans ask of a device."""
    arch = "sm_{}{}{}".format(*device.capability, "a" if device.has_wgmma else "")
    facts = device.capability, device.smem_limit, device.num_sms, device.has_wgmma, device.name, device.compiler
    return Gpu(arch, *facts, offset=0 if aligned else ALIGNMENT // 2)


class Candidate(NamedTuple):
    """A candidate for a pass, and what is known of it before it is measured."""

    direction: str
    place: Place
    kernels: tuple[Kernel, ...]
    details: str  # what tells it from others with the same tile
    num_splits: int | None  # of the keys, where the plan compares numbers of them
    predicted_us: float | None  # where the family has a model in seconds
    weight: float | None  # the time in units of the first candidate's, where it has one of tiles against each other
    refused_bytes: int | None  # that it spilled on this GPU with this compiler; 0 if it never did, None without a GPU
    is_chosen: bool  # a call runs it

    @property
    def family(self) -> str:
        """The family, for users."""
        path = file_of(self.kernels[0].config.entry)
        return next((words for part, words in _FAMILIES.items() if part in path), path)

    @property
    def words(self) -> str:
        """Kernels with their tiles, for users."""
        kernels = ", ".join(f"{kernel.entry} {kernel.config.tile}" for kernel in self.kernels)
        splits = f"{self.num_splits} splits of the keys" if (self.num_splits or 1) > 1 else ""
        return ", ".join(filter(None, (kernels, self.details, splits)))

    @property
    def prediction(self) -> str:
        """The predicted time in words, for users."""
        if self.predicted_us is not None:
            return f"{self.predicted_us:.1f} us"
        if self.weight is not None:
            return "the first" if self.place.candidate == 0 else f"x{self.weight:.2f} of the first"
        return "as the table stands"

    def as_json(self) -> dict[str, Any]:
        """The candidate's facts as JSON, for programs."""
        return {
            "direction": self.direction,
            "family": self.family,
            "kernels": [{"entry": kernel.entry, "tile": kernel.config.tile} for kernel in self.kernels],
            "flags": self.kernels[0].config.flags,
            "smem_bytes": max(kernel.smem_bytes for kernel in self.kernels),
            "answer": self.place.number,
            "candidate": self.place.candidate,
            "num_splits": self.num_splits,
            "predicted_us": self.predicted_us,
            "relative_weight": self.weight,
            "refused_bytes": self.refused_bytes,
            "chosen": self.is_chosen,
        }


def work_of(
    direction: str, problem: AttentionProblem, arrays: dict[str, Array], operands: Operands, device: Any
) -> Work:
    """Return the work of a pass on arrays of `problems.shapes_of`, whose operands are these."""
    results = {name: arrays[name] for name in (("out", "lse") if direction == FORWARD else ("dout", "out", "lse"))}
    work = Work(problem, operands, results, device)
    if direction == BACKWARD:
        work.arrays["delta"] = work.empty(problem.lse_shape, problem.accum_dtype)
    return work


def run(direction: str, work: Work, grads: dict[str, Array]) -> None:
    """Run a pass, as calls do; `grads` are the arrays of its gradients."""
    if direction == FORWARD:
        backend.run_forward(work)
    else:
        backend.run_backward(work, {}, grads)


def grads_of(problem: AttentionProblem, arrays: dict[str, Array], empty: Callable[[Array], Array]) -> dict[str, Array]:
    """Return arrays for all gradients of a problem."""
    return {name: empty(arrays[name]) for name in problem.grad_names}


def candidates_of(problem: AttentionProblem, gpu: Gpu) -> list[Candidate]:
    """Return the candidates of both passes, in the order in which a pass asks for them."""
    return [candidate for direction in DIRECTIONS for candidate in _of_direction(direction, problem, gpu)]


def _of_direction(direction: str, problem: AttentionProblem, gpu: Gpu) -> Iterator[Candidate]:
    launches = _launches_of(problem, gpu) if direction == FORWARD else []
    chosen = launches[0] if launches else None
    for number, answer in enumerate(_answers(direction, problem, gpu, chosen)):
        of_first = chosen.num_splits if chosen is not None and number == 0 else None
        splits = [of_first or _decode_splits(problem, kernels, gpu) for kernels in answer]
        times = [_predicted_us(problem, kernels, n or 1, gpu) for kernels, n in zip(answer, splits, strict=True)]
        weights = _weights_of(answer)
        refused = [_refused_bytes(kernels, gpu) for kernels in answer]
        taken = _taken([bytes_ or 0 for bytes_ in refused])
        found = list(zip(answer, splits, strict=True))
        others = [(_answers(direction, problem, gpu, own)[0][0], own) for own in launches[1:] if number == 0]
        others = [(kernels, own) for kernels, own in others if (kernels, own.num_splits) not in found]
        details = _details_of([*found, *((kernels, own.num_splits) for kernels, own in others)])
        facts = zip(answer, details[: len(answer)], splits, times, weights, refused, strict=True)
        for place, (kernels, words, num_splits, us, weight, spilled) in enumerate(facts):
            own_place = Place(number, place)
            yield Candidate(direction, own_place, kernels, words, num_splits, us, weight, spilled, place == taken)
        for (kernels, own), words in zip(others, details[len(answer) :], strict=True):
            us = _predicted_us(problem, kernels, own.num_splits, gpu)
            rest = own.num_splits, us, None, _refused_bytes(kernels, gpu)
            yield Candidate(direction, Place(0, 0, own), kernels, words, *rest, is_chosen=False)


def _taken(refused: Sequence[int]) -> int:
    """Return the place of the candidate that `gpu.choose` takes, as far as it is known what spills."""
    return refused.index(min(refused))


def with_spills(found: Sequence[Candidate], spilled: Sequence[int]) -> list[Candidate]:
    """Return candidates of which those are chosen that a call takes, as it is known now how many bytes each spills."""
    answers: dict[tuple[str, int], list[int]] = {}
    for index, own in enumerate(found):
        if own.place.launches is None:
            answers.setdefault((own.direction, own.place.number), []).append(index)
    taken = {indices[_taken([spilled[i] for i in indices])] for indices in answers.values()}
    return [own._replace(is_chosen=index in taken) for index, own in enumerate(found)]


def _details_of(passes: Sequence[tuple[tuple[Kernel, ...], int | None]]) -> list[str]:
    """Return what tells configurations with the same words and splits apart, in words; nothing of the others."""
    shown = [([(kernel.entry, kernel.config.tile) for kernel in kernels], splits) for kernels, splits in passes]
    found = []
    for own, (kernels, _) in zip(shown, passes, strict=True):
        alike = [other[0].config for text, (other, _) in zip(shown, passes, strict=True) if text == own]
        config = kernels[0].config
        names = [f.name for f in fields(config) if f.name not in _NO_DETAILS]
        told = [name for name in names if any(getattr(other, name, None) != getattr(config, name) for other in alike)]
        found.append(", ".join(f"{name} {getattr(config, name)}" for name in told))
    return found


def _answers(
    direction: str, problem: AttentionProblem, gpu: Gpu, launches: sm90_grid.Launches | None
) -> list[tuple[tuple[Kernel, ...], ...]]:
    arrays = problems.arrays_of(problem, problems.stand_in)
    operands = problems.operands_of(problem, arrays, with_mask=False)
    rehearsal = Rehearsal(work_of(direction, problem, arrays, operands, gpu))
    rehearsal.launches = launches
    run(direction, rehearsal, grads_of(problem, arrays, lambda x: x))
    return [answer.candidates for answer in rehearsal.passes]


def _launches_of(problem: AttentionProblem, gpu: Gpu) -> list[sm90_grid.Launches]:
    """Return Hopper's kernels and splits of the keys that the plan compares, its choice first; none of other GPUs."""
    if not (gpu.has_wgmma and not gpu.offset and sm90_grid.is_modelled(problem)):
        return []
    own = sm90_forward.config_for(problem)
    found = [sm90_grid.for_grid(problem, own, gpu.num_sms)]
    if sm90_forward.has_few_queries(problem):
        return found
    for config in dict.fromkeys((*sm90_grid.compared(problem, own), *sm90_grid.other_tiles(problem, own))):
        for n in sm90_times.splits_worth_trying(problem, config, gpu.num_sms):
            found.append(sm90_grid.for_grid(replace(problem, num_splits=n), config, gpu.num_sms))
    return _each_once(found)


def _each_once(found: Sequence[sm90_grid.Launches]) -> list[sm90_grid.Launches]:
    """Return launches whose tiles, rows and splits differ, the first of each."""
    by_words = {(own.config.tile, own.config.packs_heads, own.num_splits): own for own in reversed(found)}
    return sorted(by_words.values(), key=found.index)


def _decode_splits(problem: AttentionProblem, kernels: tuple[Kernel, ...], gpu: Gpu) -> int | None:
    """Return the splits of the keys where one query is over a cache; None of other kernels."""
    config = kernels[0].config
    return decode.num_splits(problem, config, gpu.num_sms) if isinstance(config, DecodeConfig) else None


def _predicted_us(problem: AttentionProblem, kernels: tuple[Kernel, ...], num_splits: int, gpu: Gpu) -> float | None:
    config = kernels[0].config
    if isinstance(config, DecodeConfig):
        return decode.predicted_us(problem, config, num_splits, gpu.num_sms)
    if not isinstance(config, Sm90ForwardConfig) or not sm90_grid.is_modelled(problem):
        return None
    model = sm90_few_queries if sm90_forward.has_few_queries(problem) else sm90_times
    return model.predicted_us(problem, config, num_splits, gpu.num_sms)


def _weights_of(answer: Sequence[tuple[Kernel, ...]]) -> list[float | None]:
    """Return predicted times over the first candidate's; None where a family has none, or orders by more than these."""
    times = [_weight(kernels[0].config) for kernels in answer]
    if any(time is None for time in times) or times != sorted(times, key=lambda x: cast("float", x)):
        return [None] * len(times)
    return [cast("float", time) / cast("float", times[0]) for time in times]


def _weight(config: KernelConfig) -> float | None:
    """Return what `sm80.times` says of a configuration, whose fields are those of its tile."""
    if not isinstance(config, Sm80QueryConfig | Sm80BackwardConfig):
        return None
    parts = getattr(config, "parts", None)
    kind = "half" if parts is None else next(kind for kind, number in PARTS_OF.items() if number == parts)
    if isinstance(config, Sm80BackwardConfig):
        return sm80_times.of_keys(Record(cast("Any", _Tile(config)), kind=kind))
    turned = getattr(config, "of_keys", False)
    return sm80_times.of_queries(Record(cast("Any", _Tile(config, turned)), kind=kind))


class _Tile:
    """A configuration as its tile, whose rows are those that thread blocks stay with."""

    short = False  # configurations do not tell

    def __init__(self, config: KernelConfig, turned: bool = False) -> None:
        self._config = config
        self.block_m, self.block_n = (config.block_n, config.block_m) if turned else (config.block_m, config.block_n)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _refused_bytes(kernels: Sequence[Kernel], gpu: Gpu) -> int | None:
    if not gpu.compiler:
        return None
    return max(refusals.known(source_of(kernel.config), gpu.compiler) for kernel in kernels)

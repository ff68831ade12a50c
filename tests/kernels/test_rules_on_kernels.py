"""Users' own rules work in the kernels, on the CPU as several architectures, and on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import devices
import numpy as np
import pytest
from cases import gaussian_case
from cpu_device import device as cpu_device
from devices import Device, device_of, has_gpu
from paging import as_paged
from visibility import hidden_keys

from cuflash.cuda import ahead
from cuflash.frontend import metadata
from cuflash.gpu import choose, launch, rule_blocks
from cuflash.gpu import params as gpu_params
from cuflash.kept import Kept
from cuflash.masks import store

needs_compiler = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
RNG = np.random.default_rng(0)
SHAPE = 70, 150


def gated(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any, kind: Any) -> Any:
    return s * 0.75 + table[h, (j - i) % 5] * np.tanh(s / 4)


def striped(b: Any, h: Any, i: Any, j: Any, table: Any, kind: Any) -> Any:
    return (i - j + h) % 3 != kind[b]


OPTIONS: dict[str, dict[str, Any]] = {
    "score_mod": {"score_mod": gated},
    "mask_mod": {"mask_mod": striped, "causal": True},
    "both": {"score_mod": gated, "mask_mod": striped, "dropout_p": 0.2, "dropout_seed": 3},
    "all": {
        "score_mod": gated,
        "mask_mod": striped,
        "window": (60, 20),
        "softcap": 5.0,
        "bias": RNG.standard_normal((1, 4, *SHAPE)).astype("float32"),
        "mask": RNG.random((2, 1, *SHAPE)) < 0.8,
        "alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4], "float32"),
        "block_mask": RNG.random(SHAPE) < 0.6,
        "deterministic": True,
    },
}


@pytest.fixture(
    params=[
        *(pytest.param(name, marks=needs_compiler) for name in ("sm_75", "sm_80", "sm_90")),
        *([pytest.param("cupy", marks=pytest.mark.gpu)] if has_gpu() else []),
    ]
)
def place(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Give a device for the library to run on."""
    devices.forget_launches()
    place = device_of(request.param)
    with place.active():
        yield place


# The kernel of the forward pass on each place of the CPU, where no rule spills; all others are the portable one.
FORWARD = {
    "float16": {"sm_75": "forward_sm80", "sm_80": "forward_sm80", "sm_90": "forward_sm90"},
    "float32": {"sm_80": "parts_forward", "sm_90": "split_forward"},
}
PORTABLE = {"forward", "backward_dq", "backward_dkv", "backward_dk", "backward_dv", "backward_bias"}


def let_spill(monkeypatch: pytest.MonkeyPatch, spilled_bytes: Callable[[Any], int]) -> None:
    """Let kernels be chosen as on a GPU whose compiler spills so many bytes of theirs."""
    monkeypatch.setattr(launch.Kernel, "spilled_bytes", lambda kernel, _: spilled_bytes(kernel))
    monkeypatch.setattr(cpu_device.CpuDevice, "compiler", "spills")
    monkeypatch.setattr(choose, "_chosen", Kept())
    monkeypatch.setenv(ahead.SWITCH, "0")


def entries_of_launches() -> set[str]:
    return {x.kernel.entry for x in launch._launches.values()}


def relative(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s + table[h, np.clip(j - i, -8, 8) + 8]


def capped(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 3 * np.tanh(s / 3)


def sloped(s: Any, b: Any, h: Any, i: Any, j: Any, slopes: Any) -> Any:
    return s - slopes[h] * abs(i - j)


def far_or_hidden(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return np.where(abs(i - j) > 20, s, -np.inf)


def sliding(b: Any, h: Any, i: Any, j: Any) -> Any:
    return abs(i - j) <= 30


def prefix(b: Any, h: Any, i: Any, j: Any, length: Any) -> Any:
    return (j < length[b]) | (j <= i)


def with_blind_rows(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i % 3 != h) & (j > 10)


TABLE = RNG.standard_normal((4, 17)).astype("float32")
WITH_NAN = np.where((np.arange(17) == 3) & (np.arange(4)[:, None] == 1), np.float32(np.nan), TABLE)
KINDS: dict[str, dict[str, Any]] = {
    "relative": {"score_mod": relative, "operands": (TABLE,)},
    "nan": {"score_mod": relative, "operands": (WITH_NAN,), "causal": True},
    "capped": {"score_mod": capped, "mask_mod": sliding},
    "sloped": {"score_mod": sloped, "operands": (np.array([0.1, 0.2, 0.3, 0.4], "float32"),), "softcap": 4.0},
    "hides": {"score_mod": far_or_hidden, "sink": np.array([0.5, -1.0, 0.0, 2.0], "float32")},
    "sliding": {"mask_mod": sliding, "kv_lengths": np.array([150, 70], np.int32)},
    "prefix": {"mask_mod": prefix, "operands": (np.array([30, 140]),), "dropout_p": 0.3, "dropout_seed": 5},
    "blind": {"mask_mod": with_blind_rows, "alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4], "float32")},
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_rules(place: Device, name: str) -> None:
    """Rules of each kind have tensor cores in both passes, and hidden keys that hold NaN stay out of the results."""
    case = given = gaussian_case(1, "float16", SHAPE, (4, 2), (64, 64), 2, **KINDS[name])
    if "mask_mod" in KINDS[name]:
        nan, hidden = np.float16(np.nan), hidden_keys(case)[..., None, None]
        given = case.with_inputs(k=np.where(hidden, nan, case.k), v=np.where(hidden, nan, case.v))
    on_place = given.on(place)
    out, lse = on_place.forward()
    case.assert_forward(out, lse)
    # The reference's sums over all scores carry a NaN to elements of an operand that it does not reach.
    wanted = ("q", "k", "v") if name == "nan" else None
    case.assert_gradients(on_place.backward(out, lse, grads=wanted), out, lse)
    assert entries_of_launches().isdisjoint(PORTABLE)


BLOCKS = {
    "sliding": {"mask_mod": lambda b, h, i, j: (i - j <= 20) & (j <= i), "causal": True},
    "prefix": {**KINDS["prefix"], "deterministic": True},
    "blind": KINDS["blind"],
    "both": {"score_mod": capped, "mask_mod": sliding, "softcap": 5.0, "kv_lengths": np.array([150, 70], np.int32)},
    "bias": {"mask_mod": sliding, "bias": RNG.standard_normal((1, 4, *SHAPE)).astype("float32")},
}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", BLOCKS)
def test_hidden_tiles_are_found(place: Device, dtype: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of 64 x 64 is known as hidden, shown or both, for each batch and head that the rule tells apart."""
    found: list[rule_blocks.RuleBlocks] = []
    make = rule_blocks.RuleBlocks.__init__

    def noted(self: Any, work: Any) -> None:
        make(self, work)
        found.append(self)

    monkeypatch.setattr(rule_blocks.RuleBlocks, "__init__", noted)
    monkeypatch.setattr(rule_blocks, "LEAST_ROWS", 1)
    case = gaussian_case(4, dtype, SHAPE, (4, 2), (64, 64), 2, **BLOCKS[name])
    on_place = case.on(place)
    out, lse = on_place.forward()
    case.assert_forward(out, lse)
    case.assert_gradients(on_place.backward(out, lse), out, lse)
    assert len(found) == 2
    slots = place.get(found[0]._own["slots"])
    h, i, j = np.ogrid[:4, : SHAPE[0], : SHAPE[1]]
    operands = case.options.get("operands", ())
    for b in range(2):
        shown = np.broadcast_to(case.options["mask_mod"](b, h, i, j, *operands), (4, *SHAPE))
        for head, m, n in np.ndindex(4, *slots.shape[2:]):
            block = shown[head, m * 64 : m * 64 + 64, n * 64 : n * 64 + 64]
            own = slots[b % len(slots), head % slots.shape[1], m, n]
            assert own == (store.VISIBLE if block.all() else 0 if block.any() else store.HIDDEN)


# Head dims, the kind of rule, whether the first row of tiles spills, and the kernel of the gradients on Hopper.
HOPPER = {
    "wide": ((96, 128), "relative", True, "backward_sm90_wide"),
    "narrow": ((128, 64), "sloped", False, "backward_sm90"),
    "192": ((192, 128), "sloped", False, "backward_sm90_wide"),
    "256": ((256, 256), "capped", False, "backward_sm90_wide"),
    "dropout": ((192, 192), "prefix", False, "backward_sm90_wide"),
    "signs": ((160, 160), "dropped", False, "backward_sm80"),  # a rule's derivative may have dropout's sign
}
KINDS_OF_HOPPER = {**KINDS, "dropped": {"score_mod": capped, "dropout_p": 0.3, "dropout_seed": 5}}


@needs_compiler
@pytest.mark.parametrize("name", HOPPER)
def test_rules_of_wide_heads_on_hopper(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dims, kind, spills, entry = HOPPER[name]
    if spills:
        let_spill(monkeypatch, lambda kernel: kernel.entry == "backward_sm90")
    case = gaussian_case(3, "bfloat16", (70, 130), (2, 1), dims, 1, **KINDS_OF_HOPPER[kind])
    devices.forget_launches()
    place = device_of("sm_90")
    with place.active():
        on_place = case.on(place)
        out, lse = on_place.forward()
        case.assert_forward(out, lse)
        case.assert_gradients(on_place.backward(out, lse), out, lse)
        assert entries_of_launches() >= {"forward_sm90", entry}


@pytest.mark.parametrize("seqlens", [(1, 300), (5, 130)], ids=str)
@pytest.mark.parametrize("name", ["relative", "prefix", "both"])
def test_few_queries(place: Device, seqlens: tuple[int, int], name: str) -> None:
    """Few queries over many keys, which take splits and rows of several heads without rules."""
    options = {name: x for name, x in {**KINDS, **BLOCKS}[name].items() if "lengths" not in name}
    case = gaussian_case(6, "bfloat16" if place.name != "sm_75" else "float16", seqlens, (4, 1), (64, 64), 2, **options)
    on_place = case.on(place)
    out, lse = on_place.forward()
    case.assert_forward(out, lse)
    case.assert_gradients(on_place.backward(out, lse), out, lse)
    assert entries_of_launches().isdisjoint(PORTABLE)


@pytest.mark.parametrize("name", ["relative", "prefix", "both"])
def test_pages(place: Device, name: str) -> None:
    """Rules see logical keys, wherever these lie in a pool."""
    options = {name: x for name, x in {**KINDS, **BLOCKS}[name].items() if "lengths" not in name}
    case = as_paged(gaussian_case(7, "float16", (20, 96), (4, 2), (64, 64), 2), 16, np.random.default_rng(7))
    case = case.with_options(**options)
    on_place = case.on(place)
    out, lse = on_place.forward()
    case.assert_forward(out, lse)
    case.assert_gradients(on_place.backward(out, lse), out, lse)


def test_a_rule_that_spills_takes_another_tile(place: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are met in their order until one keeps everything in registers; else the least of them is taken."""
    seen: list[tuple[str, str]] = []
    spilled = {"64x64": 400, "32x64": 8, "64x32": 16}

    def bytes_of(kernel: Any) -> int:
        seen.append((kernel.entry, kernel.config.tile))
        return spilled.get(kernel.config.tile, 600)

    let_spill(monkeypatch, bytes_of)
    case = gaussian_case(2, "float16", SHAPE, (2, 2), (64, 64), 1, **KINDS["relative"])
    on_place = case.on(place)
    out, lse = on_place.forward()
    case.assert_forward(out, lse)
    case.assert_gradients(on_place.backward(out, lse), out, lse)
    taken = {x.kernel.entry: x.kernel.config.tile for x in launch._launches.values()}
    # On Hopper no tile of its own keeps the rule in registers here, so that mma.sync serves.
    assert taken["forward_sm80"] == "64x32" and taken["backward_sm80"] == "32x64"
    has_room = place.name != "sm_75"  # whose shared memory holds one tile alone
    assert (len({tile for entry, tile in seen if entry == "backward_sm80"}) > 1) == has_room


OF_PARTS = {"split_channels", "split_rows"}  # kernels before those on parts


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", OPTIONS)
def test_rules(place: Device, dtype: str, name: str) -> None:
    operands = RNG.standard_normal((4, 5)).astype("float32") * 0.5, np.array([0, 1, 2], np.int16)
    case = gaussian_case(0, dtype, SHAPE, (4, 2), (64, 64), 2, operands=operands, **OPTIONS[name])
    on_place = case.on(place)
    out, lse = on_place.forward()
    case.assert_forward(out, lse)
    on_gpu = place.name == "cupy"  # where the rule may spill
    assert on_gpu or entries_of_launches() - OF_PARTS == {FORWARD[dtype].get(place.name, "forward")}
    case.assert_gradients(on_place.backward(out, lse), out, lse)
    entries = entries_of_launches()
    assert on_gpu or entries.isdisjoint(PORTABLE) == (dtype == "float16" or place.name != "sm_75")
    if "score_mod" in OPTIONS[name]:
        assert ("operand_words" if "deterministic" in OPTIONS[name] else "backward_operands") in entries


@pytest.mark.parametrize("least_rows", [1, rule_blocks.LEAST_ROWS])
def test_a_repeated_call_reads_its_operands_anew(
    place: Device, least_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that is known again launches the same kernels on what the operands hold now, hidden tiles included."""
    monkeypatch.setattr(rule_blocks, "LEAST_ROWS", least_rows)
    operands = np.zeros((4, 5), "float32"), np.array([0, 1], np.int16)
    rules: dict[str, Any] = {"score_mod": gated, "mask_mod": striped, "operands": operands}
    case = gaussian_case(0, "float16", (33, 40), (4, 2), (32, 32), 2, **rules)
    on_place = case.on(place)
    first = on_place.forward()
    assert len(metadata._repeats) == 1
    table = RNG.standard_normal((4, 5)).astype("float32")
    on_place.options["operands"][0][...] = place.put(table)
    on_place.options["operands"][1][...] = place.put(np.array([2, 0], np.int16))
    second = on_place.forward()
    assert len(metadata._repeats) == 1
    changed = case.with_options(operands=(table, np.array([2, 0], np.int16)))
    changed.assert_forward(*second)
    assert (first[0] != second[0]).any()


def test_operands_of_many_axes(place: Device) -> None:
    """Their gradients are written whatever their strides: by launches of some axes each, if they do not fold."""
    shape = (2,) * 10

    def looked_up(s: Any, b: Any, h: Any, i: Any, j: Any, scale: Any, table: Any) -> Any:
        return s * scale + table[(i % 2, j % 2, h, (i + j) % 2, i % 2, (i - j) % 2, j % 2, h, j % 2, i % 2)]

    operands = np.array(0.5, np.float32), RNG.standard_normal(shape).astype("float32")
    case = gaussian_case(0, "float32", (17, 30), (2, 1), (32, 32), 1, score_mod=looked_up, operands=operands)
    on_place = case.on(place)
    out, lse = on_place.forward()
    grads = on_place.backward(out, lse)
    case.assert_gradients(grads)
    target = place.put(np.full((3,) * 10, np.nan, np.float32))
    inner = target[(slice(2),) * 10]
    on_place.backward(out, lse, out=(None, None, None, None, inner))
    np.testing.assert_allclose(place.get(inner), grads["operand_1"], rtol=1e-5, atol=1e-5)
    assert np.isnan(place.get(target)).sum() == 3**10 - 2**10


# So many operands of so many axes are more than a kernel's parameters hold.
MANY_OPERANDS, NO_OFFSET = 26, (0,) * 6


def summed(s: Any, b: Any, h: Any, i: Any, j: Any, *tables: Any) -> Any:
    for n, table in enumerate(tables):
        s = s + 0.1 * table[((i + n) % 3, j % 4) + NO_OFFSET]
    return s


@pytest.mark.parametrize("deterministic", [False, True])
def test_more_operands_than_parameters_hold(place: Device, deterministic: bool) -> None:
    """Their descriptions lie in device memory, and a call that is known again writes them anew."""
    devices.forget_launches()
    for seed in range(2):
        rng = np.random.default_rng(seed)
        tables = tuple(rng.standard_normal((3, 4) + (1,) * 6).astype("float32") for _ in range(MANY_OPERANDS))
        rules: dict[str, Any] = {"score_mod": summed, "operands": tables, "deterministic": deterministic}
        assert MANY_OPERANDS * (2 + 2 * tables[0].ndim) * 8 > gpu_params.MOST_BYTES - gpu_params.PARAMS.dtype.itemsize
        case = gaussian_case(seed, "float32", (5, 9), (2, 1), (32, 32), 1, **rules)
        on_place = case.on(place)
        out, lse = on_place.forward()
        case.assert_forward(out, lse)
        case.assert_gradients(on_place.backward(out, lse))
    assert len(metadata._repeats) == 2

"""The problem of a call of `append_kv`, known from its metadata, and every check and message of such a call."""

from __future__ import annotations

from dataclasses import dataclass

from cuflash.problem.attention_problem import DTYPES, Array, accum_of

# Arrays of uint8 hold e4m3 codes, as those of ml_dtypes do.
FP8_DTYPES = ("uint8", "float8_e4m3fn")


@dataclass(frozen=True)
class AppendProblem:
    """New keys and values, and the caches that receive them.

    A contiguous cache has a page for each sequence, which holds its whole capacity.
    """

    packed: bool
    batch: int
    seqlen: int  # new rows of each sequence; of packed ones their total
    num_heads_kv: int
    num_heads_q: int  # 0 without q
    head_dim: int
    head_dim_v: int
    dtype: str  # of k, v and q
    num_pages: int
    page_size: int
    max_pages: int | None  # columns of the block table; None of contiguous caches
    rotary_dim: int  # columns that are rotated
    num_positions: int  # rows of the rotary table
    table_dtypes: tuple[str, str]  # of cos and sin
    interleaved: bool
    to_fp8: bool  # the caches hold e4m3 codes

    @property
    def rows(self) -> int:
        """New rows of all sequences."""
        return self.seqlen if self.packed else self.batch * self.seqlen

    @property
    def accum_dtype(self) -> str:
        """The dtype of the arithmetic."""
        return accum_of(self.dtype)

    @property
    def capacity(self) -> int:
        """Positions that a sequence has."""
        return self.page_size * (1 if self.max_pages is None else self.max_pages)


def make_append_problem(arrays: dict[str, Array], interleaved: bool) -> AppendProblem:
    """Make the problem of adopted arrays by the names of `append_kv`'s arguments (those of `rotary` are cos and sin).

    Raises TypeError for a dtype and ValueError for a shape that does not fit.
    """
    k, v, k_cache = arrays["k"], arrays["v"], arrays["k_cache"]
    packed = "cu_seqlens" in arrays
    dtype = _check_new_rows(arrays, packed)
    batch = _check_places(arrays, packed)
    num_heads_kv, head_dim = k.shape[-2:]
    to_fp8 = _check_caches(arrays, batch, dtype)
    rotary_dim = _check_rotary(arrays, dtype)
    _check_scales(arrays, to_fp8)
    return AppendProblem(
        packed=packed,
        batch=batch,
        seqlen=k.shape[-3],
        num_heads_kv=num_heads_kv,
        num_heads_q=arrays["q"].shape[-2] if "q" in arrays else 0,
        head_dim=head_dim,
        head_dim_v=v.shape[-1],
        dtype=dtype,
        num_pages=k_cache.shape[0],
        page_size=k_cache.shape[1],
        max_pages=arrays["block_table"].shape[1] if "block_table" in arrays else None,
        rotary_dim=rotary_dim,
        num_positions=len(arrays["cos"]) if rotary_dim else 0,
        table_dtypes=(arrays["cos"].dtype.name, arrays["sin"].dtype.name) if rotary_dim else ("float32", "float32"),
        interleaved=interleaved,
        to_fp8=to_fp8,
    )


def _check_new_rows(arrays: dict[str, Array], packed: bool) -> str:
    """Check k, v and q, and return their dtype."""
    k, rank = arrays["k"], 3 if packed else 4
    axes = "(total, num_heads_kv, head_dim)" if packed else "(batch, seqlen, num_heads_kv, head_dim)"
    dtype: str = k.dtype.name
    if dtype not in DTYPES:
        raise TypeError(f"k: expected dtype {', '.join(DTYPES)}, got {dtype}")
    if k.ndim != rank:
        hint = "" if packed else "; packed rows need cu_seqlens"
        raise ValueError(f"k: expected {axes}, got {k.shape}{hint}")
    for name, fixed in (("v", k.shape[:-1]), ("q", k.shape[:-2])):
        if name not in arrays:
            continue
        x = arrays[name]
        if x.dtype.name != dtype:
            raise TypeError(f"{name}: expected k's dtype {dtype}, got {x.dtype.name}")
        wanted = (*fixed, "*") if name == "v" else (*fixed, "*", k.shape[-1])
        _check_shape(name, x, wanted, axes.replace("_kv", "_q") if name == "q" else axes.replace("dim)", "dim_v)"))
    return dtype


def _check_places(arrays: dict[str, Array], packed: bool) -> int:
    """Check kv_lengths, block_table and cu_seqlens, and return the number of sequences."""
    lengths = arrays["kv_lengths"]
    for name in ("kv_lengths", "block_table", "cu_seqlens"):
        if name in arrays and arrays[name].dtype.name != "int32":
            raise TypeError(f"{name}: expected dtype int32, got {arrays[name].dtype.name}")
    if not packed:
        batch: int = arrays["k"].shape[0]
    else:
        cu_seqlens = arrays["cu_seqlens"]
        if cu_seqlens.ndim != 1 or len(cu_seqlens) == 0:
            raise ValueError(f"cu_seqlens: expected shape (batch + 1,), got {cu_seqlens.shape}")
        batch = len(cu_seqlens) - 1
    _check_shape("kv_lengths", lengths, (batch,), "(batch,)")
    if "block_table" in arrays:
        _check_shape("block_table", arrays["block_table"], (batch, "*"), "(batch, max_pages)")
    return batch


def _check_caches(arrays: dict[str, Array], batch: int, dtype: str) -> bool:
    """Check both caches, and return True if they hold FP8."""
    k, v, k_cache, v_cache = (arrays[name] for name in ("k", "v", "k_cache", "v_cache"))
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dtype.name not in (dtype, *FP8_DTYPES):
            raise TypeError(f"{name}: expected k's dtype {dtype} or FP8 ({', '.join(FP8_DTYPES)}), got {x.dtype.name}")
    are_fp8 = [x.dtype.name in FP8_DTYPES for x in (k_cache, v_cache)]
    if are_fp8[0] != are_fp8[1]:
        raise TypeError(
            f"v_cache: expected FP8 in both caches or in neither, got {v_cache.dtype.name} beside {k_cache.dtype.name}"
        )
    paged = "block_table" in arrays
    axes = ("num_pages, page_size" if paged else "batch, capacity") + ", num_heads_kv, head_dim"
    pages = "*" if paged else batch
    _check_shape("k_cache", k_cache, (pages, "*", *k.shape[-2:]), f"({axes})")
    _check_shape("v_cache", v_cache, (*k_cache.shape[:2], *v.shape[-2:]), f"({axes}_v)")
    return are_fp8[0]


def _check_rotary(arrays: dict[str, Array], dtype: str) -> int:
    """Check cos and sin, and return the number of columns that are rotated."""
    if "cos" not in arrays:
        return 0
    cos, sin, head_dim = arrays["cos"], arrays["sin"], arrays["k"].shape[-1]
    for name, x in (("cos", cos), ("sin", sin)):
        if x.dtype.name not in ("float32", dtype):
            wanted = " or ".join(dict.fromkeys(("float32", dtype)))
            raise TypeError(f"rotary, {name}: expected dtype {wanted}, got {x.dtype.name}")
    if cos.ndim != 2 or len(cos) == 0:
        raise ValueError(f"rotary, cos: expected (positions, rotary_dim / 2) with a position at least, got {cos.shape}")
    if 2 * cos.shape[1] > head_dim:
        raise ValueError(
            f"rotary, cos: expected (positions, rotary_dim / 2) with rotary_dim <= head_dim = {head_dim}, "
            f"got {cos.shape}"
        )
    _check_shape("rotary, sin", sin, cos.shape, "(positions, rotary_dim / 2)")
    return 2 * int(cos.shape[1])


def _check_scales(arrays: dict[str, Array], to_fp8: bool) -> None:
    """Check the scales of an FP8 cache's new rows."""
    k = arrays["k"]
    wanted = k.shape[:-1]
    for name in ("k_scale", "v_scale"):
        if name not in arrays:
            continue
        x = arrays[name]
        if not to_fp8:
            cache = arrays["k_cache"].dtype.name
            raise ValueError(f"{name}: expected None, as the caches are not FP8 but {cache}, got an array")
        if x.dtype.name != "float32":
            raise TypeError(f"{name}: expected dtype float32, got {x.dtype.name}")
        if x.ndim != len(wanted) or any(have not in (1, want) for have, want in zip(x.shape, wanted, strict=True)):
            axes = "(batch, seqlen, num_heads_kv)" if len(wanted) == 3 else "(total, num_heads_kv)"
            raise ValueError(f"{name}: expected a shape that broadcasts to {axes} = {tuple(wanted)}, got {x.shape}")


def _check_shape(name: str, x: Array, wanted: tuple[int | str, ...], axes: str) -> None:
    """Raise ValueError unless `x` has this shape, in which "*" is any size."""
    if len(x.shape) != len(wanted) or any(want not in ("*", have) for have, want in zip(x.shape, wanted, strict=True)):
        sizes = ", ".join(map(str, wanted)) + ("," if len(wanted) == 1 else "")
        raise ValueError(f"{name}: expected {axes} = ({sizes}), got {tuple(x.shape)}")

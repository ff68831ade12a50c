"""The attention problem that a call's metadata describe; every array's shape and dtype is checked here."""

from __future__ import annotations

from cuflash import e4m3
from cuflash.problem import checks
from cuflash.problem.attention_problem import DTYPES, MAX_HEAD_DIM, Array, AttentionProblem, accum_of
from cuflash.problem.fp8 import check_fp8_dtypes, check_out_dtype, check_scales, is_fp8
from cuflash.problem.options import Options
from cuflash.problem.own_rules import operand_types
from cuflash.problem.pages import check_cu_seqlens_k, check_pages, check_splits
from cuflash.rules.form import trace_rules


def make_problem(arrays: dict[str, Array], options: Options) -> AttentionProblem:
    """Check a call's metadata and describe it."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    packed = "cu_seqlens_q" in arrays
    dtype = _check_inputs(q, k, v, packed, is_paged=options.block_table is not None)
    (*_, seqlen_q, num_heads_q, head_dim), (*_, seqlen_k, num_heads_kv, head_dim_v) = q.shape, v.shape
    if packed:
        check_cu_seqlens_k(arrays.get("cu_seqlens_k"), options.block_table)
        batch = checks.check_cu_seqlens(arrays["cu_seqlens_q"], arrays.get("cu_seqlens_k"))
    else:
        batch = q.shape[0]
    pages = None
    rows, columns = (None, None) if packed else (seqlen_q, seqlen_k)  # of the scores that bias and masks cover
    if options.block_table is not None:
        pages = check_pages(options.block_table, batch, tuple(k.shape), options.kv_lengths)
        columns = pages.capacity
        seqlen_k = batch * columns if packed else columns
    score_shape: tuple[int | None, ...] = (batch, num_heads_q, rows, columns)

    accum = accum_of(dtype)
    result = check_out_dtype(options.out_dtype, dtype)
    check_scales(arrays, options)
    o = options
    for name, lengths in (("q_lengths", o.q_lengths), ("kv_lengths", o.kv_lengths)):
        checks.check_extra(name, lengths, "int32", [(batch,)], "(batch,)")
    checks.check_extra("sink", o.sink, accum, [(num_heads_q,)], "(num_heads_q,)")
    checks.check_extra(
        "alibi_slopes",
        o.alibi_slopes,
        accum,
        [(num_heads_q,), (1, num_heads_q), (batch, num_heads_q)],
        "(num_heads_q,) or (batch, num_heads_q)",
    )
    checks.check_block_mask(o.block_mask, score_shape)
    (left, right), has_block_mask = _windows(o, packed)
    dropout_p = checks.check_dropout_p(o.dropout_p)
    checks.check_deterministic(o.deterministic)
    checks.check_precision(o.precision)
    num_splits, split_size = check_splits(o.num_splits, o.split_size)
    operands = operand_types(o.operands)
    alibi = o.alibi_slopes
    bias_dtypes = ("float32",) if dtype == e4m3.NAME else (dtype, "float32")
    return AttentionProblem(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        packed=packed,
        window_left=left,
        window_right=right,
        softmax_scale=checks.check_scale(o.softmax_scale, head_dim, accum),
        softcap=checks.check_softcap(o.softcap, accum),
        bias=checks.check_scores_like("bias", o.bias, score_shape, bias_dtypes),
        bias_dtype=None if o.bias is None else o.bias.dtype.name,
        mask=checks.check_scores_like("mask", o.mask, score_shape, ("bool",)),
        alibi=None if alibi is None else (alibi.shape[0] if len(alibi.shape) == 2 else 1, num_heads_q),
        sink=o.sink is not None,
        q_lengths=o.q_lengths is not None,
        kv_lengths=o.kv_lengths is not None,
        block_mask=has_block_mask,
        block_size=o.block_mask.block_size if has_block_mask and o.block_mask is not None else (0, 0),
        dropout_p=dropout_p,
        deterministic=None if o.deterministic is None else bool(o.deterministic),
        precision=o.precision if dtype == "float32" else None,
        rules=trace_rules(o.score_mod, o.mask_mod, operands, accum),
        operands=operands,
        pages=pages,
        num_splits=num_splits,
        split_size=split_size,
        has_fp8_keys=is_fp8(k),
        out_dtype=None if result == dtype else result,
    )


def _windows(o: Options, packed: bool) -> tuple[tuple[int | None, int | None], bool]:
    """Return the window with causal and with a block mask that is one, and whether there is another block mask."""
    window = checks.check_window(o.causal, o.window)
    # Lengths move a window but no mask, so a mask counts as a window only where there are no lengths.
    are_whole = not packed and o.q_lengths is None and o.kv_lengths is None
    if o.block_mask is None or not are_whole or not o.block_mask.window:
        return window, o.block_mask is not None
    left, right = (
        min((x for x in pair if x is not None), default=None) for pair in zip(window, o.block_mask.window, strict=True)
    )
    return (left, right), False


def _check_inputs(q: Array, k: Array, v: Array, packed: bool, is_paged: bool) -> str:
    """Check that shapes and heads of q, k and v fit, and return their dtype."""
    q_axes, k_axes = ("total_q", "total_k") if packed else ("batch, seqlen_q", "batch, seqlen_k")
    rank = 3 if packed else 4
    k_axes, k_rank = ("num_pages, page_size", 4) if is_paged else (k_axes, rank)
    q_form, k_form = f"({q_axes}, num_heads_q, head_dim)", f"({k_axes}, num_heads_kv, head_dim)"
    v_form = f"({k_axes}, num_heads_kv, head_dim_v)"
    for name, x, form, axes in (("q", q, q_form, rank), ("k", k, k_form, k_rank), ("v", v, v_form, k_rank)):
        if len(x.shape) != axes:
            raise ValueError(f"{name}: expected {form}, got {x.shape}")
    dtype = _check_dtypes(q, k, v)
    num_heads_q, head_dim = q.shape[-2:]
    num_heads_kv, head_dim_v = v.shape[-2:]
    leading = (None,) if is_paged else q.shape[:-3]
    _check_shape("k", k, k_form, (*leading, None, None, head_dim))
    _check_shape("v", v, v_form, (*k.shape[:-1], None))
    for name, size in (("head_dim of q", head_dim), ("head_dim_v of v", head_dim_v)):
        if not 0 < size <= MAX_HEAD_DIM:
            error = NotImplementedError if size else ValueError
            raise error(f"{name}: expected 1 to {MAX_HEAD_DIM}, got {size}")
    if num_heads_kv == 0 or num_heads_q == 0 or num_heads_q % num_heads_kv:
        raise ValueError(
            f"heads: expected num_heads_q to be a positive multiple of num_heads_kv (grouped-query attention), "
            f"got num_heads_q = {num_heads_q}, num_heads_kv = {num_heads_kv}"
        )
    return dtype


def _check_dtypes(q: Array, k: Array, v: Array) -> str:
    if is_fp8(q) or is_fp8(k) or is_fp8(v):
        return check_fp8_dtypes(q, k, v)
    dtype: str = q.dtype.name
    if dtype not in DTYPES:
        raise TypeError(f"q: expected dtype {', '.join(DTYPES)}, or uint8 for e4m3 codes, got {dtype}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype.name != dtype:
            raise TypeError(f"{name}: expected q's dtype {dtype}, got {x.dtype.name}")
    return dtype


def _check_shape(name: str, x: Array, form: str, expected: tuple[int | None, ...]) -> None:
    if any(want is not None and want != got for want, got in zip(expected, x.shape, strict=True)):
        wanted = ", ".join("*" if want is None else str(want) for want in expected)
        raise ValueError(f"{name}: expected {form} = ({wanted}), got {tuple(x.shape)}")

"""Errors for calls in the way of another library say what is expected here, and what its names are called.

A good call pays for that by one frame (`with_hints`), or by looking at its arguments where it takes few microseconds
(`MISSING`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypedDict, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Hints = Mapping[str, str]  # another library's keyword: what to write in its place

PAGE = "docs/migration.md"
_WHERE = "in the source distribution and the repository"  # a wheel has no pages

_WINDOW = "window=(left, right), with None in place of -1"
_LAST_KEYS = "window=(n - 1, 0) for the last n keys, the query's own among them"
_MASK = "mask= for bools (True = may attend) and bias= for numbers that are added"
_PADDING = "kv_lengths=, or mask=~x[:, None, None, :] for an x that is True where a key is padding"
_CAUSAL = "causal=True, aligned to the bottom right"
_SCALE = "softmax_scale="
_CAP = "softcap="
_LSE = "return_lse=True"
_SINK = "sink="
_KEYS_IN_USE = "kv_lengths=, which counts the new keys, too"
_QUERIES_IN_USE = "q_lengths="
_TABLE = "block_table="
_PACKED = "attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, ...)"
_CU_SEQLENS = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "cu_seqlens",
    "cu_seqlens_kv",
    "query_start_loc",
    "qo_indptr",
    "kv_indptr",
)
_CSR = "block_table= and kv_lengths= of cuflash.conversions.from_csr"
_NO_LENGTH = "nothing: cu_seqlens are enough, and no maximum is needed"
_SHAPES = "nothing: k and v with fewer heads than q say it"
_DROPOUT = "dropout_p= and dropout_seed="
_NO_KERNEL = "nothing: arrays and options choose the kernel"

# Attention in all its forms has these.
OPTIONS: Hints = {
    **dict.fromkeys(("query", "queries", "Q"), "q"),
    **dict.fromkeys(("key", "keys", "K"), "k"),
    **dict.fromkeys(("value", "values", "V"), "v"),
    **dict.fromkeys(("custom_mask", "packed_custom_mask"), f"{_MASK}; block_mask= for a mask of blocks"),
    **dict.fromkeys(("alibi", "use_alibi"), "alibi_slopes="),
    "rotary_interleaved": "interleaved= of append_kv, beside rotary=(cos, sin)",
    "qkv_format": f'nothing for "bshd"; for "sbhd" x.swapaxes(0, 1), for "thd" {_PACKED}',
    **dict.fromkeys(
        ("layout", "tensor_layout", "qkv_layout", "kv_layout"),
        "nothing for (batch, seqlen, num_heads, head_dim); x.swapaxes(1, 2) of (batch, num_heads, seqlen, head_dim)",
    ),
    "rng_seed": "dropout_seed=",
    **dict.fromkeys(("max_s", "max_seqlen_kv"), _NO_LENGTH),
    "cu_seqlens_k_new": "cu_seqlens= of append_kv",
    "num_sm": _NO_KERNEL,
    "inference": "nothing: attention keeps nothing for gradients, and attention_vjp does",
    **dict.fromkeys(("window_size", "local_window_size", "sliding_window_size"), _WINDOW),
    **dict.fromkeys(("window_size_left", "window_left", "left_window_size"), "window=(left, right)"),
    **dict.fromkeys(("window_size_right", "window_right", "right_window_size"), "window=(left, right)"),
    **dict.fromkeys(("sliding_window", "sliding_window_length"), _LAST_KEYS),
    "attn_mask": _MASK,
    "attention_mask": _MASK,
    "attn_bias": "bias= for an array; a class of biases is causal=, window= or attention_varlen",
    "key_padding_mask": _PADDING,
    "padding_mask": _PADDING,
    "use_padding_mask": "q_lengths= and kv_lengths=",
    **dict.fromkeys(("diagonal_band_left_bound", "diagonal_band_right_bound"), "window=(left, right)"),
    "use_causal_mask_bottom_right": _CAUSAL,
    **dict.fromkeys(("is_causal", "use_causal_mask"), f"{_CAUSAL} (torch's is aligned to the top left)"),
    **dict.fromkeys(("enable_gqa", "num_kv_groups", "pack_gqa"), _SHAPES),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "max_seqlen", "max_query_len", "max_seq_len"), _NO_LENGTH),
    **dict.fromkeys(("scale", "sm_scale", "attn_scale", "scaling", "qk_scale"), _SCALE),
    **dict.fromkeys(("logits_soft_cap", "logit_cap", "attn_logits_soft_cap", "soft_cap"), _CAP),
    **dict.fromkeys(("return_softmax_lse", "return_attn_probs", "return_softmax", "return_residual"), _LSE),
    **dict.fromkeys(("generate_stats", "is_inference", "return_aux"), _LSE),
    **dict.fromkeys(("sinks", "s_aux", "learnable_sink", "sink_token"), _SINK),
    **dict.fromkeys(("cache_seqlens", "seqused_k", "seq_lens", "seq_len_kv", "seqlens_k"), _KEYS_IN_USE),
    **dict.fromkeys(("key_value_seq_lengths", "context_lens"), _KEYS_IN_USE),
    **dict.fromkeys(("query_seq_lengths", "seqused_q", "seq_len_q"), _QUERIES_IN_USE),
    **dict.fromkeys(("page_table", "block_tables", "page_table_k", "page_table_v"), _TABLE),
    **dict.fromkeys(("paged_attention_k_table", "paged_attention_v_table"), _TABLE),
    **dict.fromkeys(_CU_SEQLENS, _PACKED),
    **dict.fromkeys(("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"), _CSR),
    **dict.fromkeys(("dropout", "dropout_rate", "p"), _DROPOUT),
    **dict.fromkeys(("seed", "rng_state", "dropout_rng", "generator"), "dropout_seed="),
    "training": "dropout_p=0.0 outside of training",
    "attention_chunk": "mask_mod=lambda b, h, i, j: i // n == j // n for chunks of n",
    "aux_tensors": "operands=",
    **dict.fromkeys(("need_weights", "output_attentions"), "nothing: the weights are never stored"),
    **dict.fromkeys(("leftpad_k", "cache_leftpad"), "mask= or mask_mod=, which hide the padding in front"),
    **dict.fromkeys(("q_descale", "descale_q"), "q_scale="),
    **dict.fromkeys(("k_descale", "descale_k"), "k_scale="),
    **dict.fromkeys(("v_descale", "descale_v"), "v_scale="),
    "alibi_mask": "alibi_slopes=",
    "use_alibi_mask": "alibi_slopes=",
    "pos_encoding_mode": 'alibi_slopes= for "ALIBI", and rotary=(cos, sin) of append_kv',
    "num_heads_kv": _SHAPES,
    "cache_batch_idx": "rows of the table: block_table=table[index]",
    "rotary_cos": "rotary=(cos, sin) of append_kv",
    "rotary_sin": "rotary=(cos, sin) of append_kv",
    "k_cache": "k, and append_kv for the new rows",
    "v_cache": "v, and append_kv for the new rows",
    "input_pos": "nothing: causal=True lets the last query see all keys",
    "query_group_size": _SHAPES,
    **dict.fromkeys(("kernel_options", "implementation", "backend", "op", "tile_m", "tile_n"), _NO_KERNEL),
    **dict.fromkeys(("sm_margin", "scheduler_metadata"), _NO_KERNEL),
}
# Functions that write into caches have these.
APPEND: Hints = {
    **dict.fromkeys(("key", "k_new"), "k"),
    **dict.fromkeys(("value", "v_new"), "v"),
    "key_cache": "k_cache",
    "value_cache": "v_cache",
    "paged_kv_cache": "k_cache and v_cache, views of its two halves",
    **dict.fromkeys(("cache_seqlens", "context_lens", "seq_lens"), "kv_lengths, which does not count the new rows"),
    **dict.fromkeys(("page_table", "block_tables", "slot_mapping"), _TABLE),
    **dict.fromkeys(("kv_indptr", "kv_indices", "kv_last_page_len"), _CSR),
    **dict.fromkeys(("rotary_cos", "rotary_sin", "cos", "sin"), "rotary=(cos, sin)"),
    "cos_sin_cache": "rotary=(table[:, :half], table[:, half:])",
    **dict.fromkeys(("rotary_interleaved", "is_neox", "is_neox_style", "interleave"), "interleaved="),
    **dict.fromkeys(("query_start_loc", "append_indptr", "cu_seqlens_k", "cu_seqlens_q"), "cu_seqlens="),
    "k_descale": "k_scale=",
    "v_descale": "v_scale=",
    "kv_cache_dtype": "the caches' own dtype",
}
# A cache of pages has these.
CACHE: Hints = {
    **dict.fromkeys(("num_blocks", "max_num_pages"), "num_pages="),
    **dict.fromkeys(("block_size", "page_len"), "page_size="),
    **dict.fromkeys(("num_kv_heads", "num_heads", "num_key_value_heads"), "num_heads_kv="),
    **dict.fromkeys(("head_size", "head_dim_qk"), "head_dim="),
    **dict.fromkeys(("num_cpu_blocks", "num_cpu_pages"), "host_pages="),
    "head_dim_vo": "head_dim_v=",
    "num_hidden_layers": "num_layers=",
    **dict.fromkeys(("kv_cache_dtype", "cache_dtype", "kv_data_type"), "dtype="),
    "device": "xp=cupy, on the current device",
    **dict.fromkeys(("max_num_blocks_per_seq", "max_blocks_per_seq"), "max_pages_per_sequence="),
}
# The constructors of masks of blocks have these.
MASKS: Hints = {
    "mask_mod": "function, the first argument of from_function",
    "B": "batch=",
    "H": "heads=",
    "num_heads": "heads=",
    **dict.fromkeys(("Q_LEN", "seq_len_q", "q_len"), "seqlen_q"),
    **dict.fromkeys(("KV_LEN", "seq_len_kv", "kv_len"), "seqlen_k"),
    "BLOCK_SIZE": "block_size=",
    "device": "nothing: a mask comes to a device when it is first used there",
    "window_size": "left and right of sliding_window",
    "is_causal": "causal=True of the patterns",
}
# Functions on partial results have these.
PARTS: Hints = {
    **dict.fromkeys(("prefix_output", "suffix_output", "v_a", "v_b"), "outs, a list of the parts' results"),
    **dict.fromkeys(("prefix_lse", "suffix_lse", "s_a", "s_b"), "lses, a list of the parts' lse"),
    **dict.fromkeys(("v", "s"), "outs and lses, lists of the parts' results and lse"),
}
QUANTIZE: Hints = {
    **dict.fromkeys(("use_per_token_if_dynamic", "per_token", "axis", "dim"), 'per="token", "head" or "tensor"'),
}

_LEARN = "attention_vjp, which gives gradients, too, or attention of cuflash.adapters"
# The module is asked for these names, which other libraries' functions and classes have.
FUNCTIONS: Hints = {
    **dict.fromkeys(("flash_attn_func", "flash_attention", "flash_attn", "FlashAttention"), f"attention, or {_LEARN}"),
    **dict.fromkeys(("flash_attn_qkvpacked_func", "flash_attn_kvpacked_func"), "attention, on slices of qkv"),
    "flash_attn_varlen_func": "attention_varlen",
    "flash_attn_varlen_qkvpacked_func": "attention_varlen, on slices of qkv",
    "flash_attn_with_kvcache": "append_kv, and attention with kv_lengths= (and block_table=); or PagedCache",
    "flex_attention": "attention, with score_mod=, mask_mod= or block_mask=",
    "create_block_mask": "BlockMask.from_function(function, seqlen_q, seqlen_k, batch=, heads=)",
    "create_mask": "BlockMask.from_function(...).to_dense()",
    **dict.fromkeys(("and_masks", "or_masks", "noop_mask"), "the operators &, | and ~ of BlockMask"),
    **dict.fromkeys(("scaled_dot_product_attention", "sdpa"), "attention, on (batch, seqlen, num_heads, head_dim)"),
    **dict.fromkeys(("memory_efficient_attention", "memory_efficient_attention_forward"), "attention"),
    "dot_product_attention": "attention, or attention of cuflash.adapters.jax",
    **dict.fromkeys(("mha", "multi_head_attention", "MultiheadAttention"), "attention, without projections"),
    **dict.fromkeys(("single_prefill_with_kv_cache", "single_decode_with_kv_cache"), "attention"),
    "BatchPrefillWithPagedKVCacheWrapper": "attention_varlen, with block_table= and kv_lengths=",
    "BatchDecodeWithPagedKVCacheWrapper": "attention, with block_table= and kv_lengths=",
    "append_paged_kv_cache": "append_kv, with block_table=",
    "reshape_and_cache": "append_kv, with block_table=",
    **dict.fromkeys(("merge_state", "merge_states", "merge_attn_states"), "merge"),
    **dict.fromkeys(("ring_flash_attn_func", "ring_attention"), "cuflash.distributed.ring_attention"),
    **dict.fromkeys(("apply_rotary", "apply_rotary_emb", "apply_rope"), "rotary=(cos, sin) of append_kv"),
    **dict.fromkeys(("LowerTriangularMask", "BlockDiagonalMask"), "causal=True, and attention_varlen"),
}
# The class BlockMask is asked for these.
CONSTRUCTORS: Hints = {
    "causal": "sliding_window(seqlen_q, seqlen_k, left=None, right=0); the option causal=True needs no mask",
    "local": "sliding_window",
    **dict.fromkeys(("create", "from_mask_mod", "from_mod"), "from_function"),
    **dict.fromkeys(("from_kv_blocks", "from_block_mask"), "from_blocks"),
    **dict.fromkeys(("from_mask", "from_array", "from_tensor", "dense"), "from_dense"),
    **dict.fromkeys(("full", "empty", "ones", "zeros"), "from_dense, of an array of bools"),
}


class NoOthers(TypedDict):
    """The ``**others`` of a function whose keywords are all named, so that type checkers refuse every other one."""


def describe(name: str, hints: Hints) -> str:
    """Return what to write in place of a keyword; nothing if no library that we know has it."""
    if name not in hints:
        return ""
    verb = "needs" if hints[name].startswith("nothing") else "calls it"
    return f'cuflash {verb} {hints[name]}; see "Coming from another attention" ({PAGE} {_WHERE})'


def unknown_keyword(name: str, hints: Hints, known: Iterable[str], what: str = "option") -> TypeError:
    """Return the error for a keyword that a function does not have."""
    names = list(known)
    meant = "".join(f"did you mean {x}? " for x in get_close_matches(name, names, 1, 0.7))
    otherwise = f"{meant}expected one of {', '.join(names)}"
    return TypeError(f"{name}: no such {what}; {describe(name, hints) or otherwise}")


def no_attribute(where: str, name: str, hints: Hints) -> AttributeError:
    """Return the error for a name that a module or a class does not have."""
    there_is_none = f"{where} has no attribute {name!r}"
    return AttributeError(f"{there_is_none}; {describe(name, hints)}" if name in hints else there_is_none)


class _Missing:
    """The default of a required argument in functions that say themselves what is missing."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Any = _Missing()
_OTHERS = "others"  # what is taken by keywords of this name is refused


def with_hints(hints: Hints) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function's TypeError for a call that does not fit its signature say what is expected, and what it is here.

    A good call pays for one more frame; functions that take microseconds do as `show_signature` says instead.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> R:
            try:
                return function(*args, **keywords)
            except TypeError:
                wrong = wrong_call(function, args, keywords, hints)
                if wrong is None:
                    raise
                raise wrong from None

        return call

    return decorate


def show_signature(function: Callable[P, R]) -> Callable[P, R]:
    """Let the signature of a function not show what it takes only to refuse it.

    That are the default `MISSING` of required arguments, a variable number of arguments by position, and ``**others``,
    for which the function raises what `wrong_call` returns.
    """
    vars(function)["__signature__"] = inspect.Signature(required_of(function))
    return function


def required_of(function: Callable[..., object]) -> list[inspect.Parameter]:
    """Return a function's parameters as its users see them, without what it takes only to refuse it."""
    every = inspect.signature(function).parameters.values()
    shown = [x for x in every if x.kind is not x.VAR_POSITIONAL and (x.kind is not x.VAR_KEYWORD or x.name != _OTHERS)]
    return [x.replace(default=x.empty) if x.default is MISSING else x for x in shown]


def wrong_options_call(
    function: Callable[..., object], args: Sequence[object], options: Mapping[str, object]
) -> TypeError:
    """Return the error for a call of attention that lacks arguments, or has too many by position."""
    wrong = wrong_call(function, args, options, OPTIONS)
    assert wrong is not None
    return wrong


def wrong_append(function: Callable[..., object], args: Sequence[object], others: Mapping[str, object]) -> TypeError:
    """Return the error for a call that writes into caches and does not fit its signature."""
    wrong = wrong_call(function, args, others, APPEND)
    assert wrong is not None
    return wrong


def wrong_call(
    function: Callable[..., object], args: Sequence[object], keywords: Mapping[str, object], hints: Hints
) -> TypeError | None:
    """Return the error for a call that does not fit a function's signature; None if it fits."""
    every = inspect.signature(function).parameters
    parameters = {name: x for name, x in every.items() if name not in ("self", "cls")}
    args = args[len(every) - len(parameters) :]
    by_place = [name for name, x in parameters.items() if x.kind is x.POSITIONAL_OR_KEYWORD]
    given = {name for name, x in zip(by_place, args, strict=False) if x is not MISSING} | keywords.keys()
    lacking = [name for name in by_place if parameters[name].default is inspect.Parameter.empty and name not in given]
    unknown = [name for name in keywords if name not in parameters]
    takes_any = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
    if not lacking and len(args) <= len(by_place) and (takes_any or not unknown):
        return None
    hinted = [name for name in unknown if name in hints]
    if hinted or (unknown and not takes_any and len(args) <= len(by_place)):
        return unknown_keyword((hinted or unknown)[0], hints, parameters, "argument")
    name = function.__qualname__.removesuffix(".__init__")
    if lacking:
        required = [name for name in by_place if parameters[name].default is inspect.Parameter.empty]
        return TypeError(f"{name}: expected {', '.join(required)}, got no {', '.join(lacking)}")
    by_name = [name for name, x in parameters.items() if x.kind is x.KEYWORD_ONLY]
    are_options = takes_any or "causal" in by_name
    others = "options, such as causal= and softmax_scale=" if are_options else ", ".join(by_name)
    rest = f", and by name {others}" if others else ""
    are_numbers = all(isinstance(x, int) and not isinstance(x, bool) for x in args[len(by_place) :])
    hint = "; no maximal lengths are needed" if "cu_seqlens_q" in by_place and are_numbers else ""
    return TypeError(
        f"{name}: expected positional arguments ({', '.join(by_place)}){rest}, got {len(args)} by position{hint}"
    )

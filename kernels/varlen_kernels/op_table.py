"""The ops, each declared once.

A row has the specification of an op, its result, the operand that it may overwrite, and how CPUs run it. From it come
the form of a CPU (`cpu`), the op that a model records, the check of its arguments, the arguments of its machine code,
and the tests and benchmarks of every form. A device without a form of its own runs the specification. An op with
machine code has three parts: its function in `reference`, its row, and its body in `cpu.bodies`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from varlen_kernels import functions, reference
from varlen_kernels.functions import ACTIVATIONS, NO_ACTIVATION, POOLINGS
from varlen_kernels.op import Arguments, Function, Op, Results, Runs
from varlen_kernels.reference.linear_int8 import FACTORS, linear_int8, linear_int8_activate
from varlen_kernels.reference.logit_edits import check_edits
from varlen_kernels.reference.paged import check_copies
from varlen_kernels.reference.sampling import check_sampling
from varlen_kernels.reference.vocabulary import SLICE_TERMS

# Features of an activation below which torch runs it: for one token the call of compiled code takes longer.
_LEAST_FEATURES = 1024
# Forms of most ops.
_BOTH = "cpu fused"


def _like(name: str) -> Callable[[Arguments], Results]:
    return lambda a: [(a[name].shape, a[name].dtype)]


def _embedded(a: Arguments) -> Results:
    return [((*a["token_ids"].shape, a["token_table"].shape[1]), a["token_table"].dtype)]


def _normed(a: Arguments) -> Results:
    return [(a["x"].shape, a["weight"].dtype)]


def _sum_and_normed(a: Arguments) -> Results:
    return [(a["x"].shape, a["x"].dtype), (a["x"].shape, a["weight"].dtype)]


def _product(a: Arguments) -> Results:
    return [((a["x"].shape[0], a["weight"].shape[1]), a["x"].dtype)]


def _panel_product(a: Arguments) -> Results:
    return [((a["x"].shape[0], a["weight"].features), a["x"].dtype)]


# A tile of rows may go on past the last one by as many, and products read whole tiles of codes. Rows are no multiple of
# 4 KiB apart, where the first-level cache has no room for a tile of them.
_MORE_ROWS, _MORE_CODES = 5, 64


def _int8_product(a: Arguments) -> Results:
    x, features = a["x"], a["layer"].scale.shape[0]
    tokens, hidden = x.shape
    columns = (-(-hidden // _MORE_CODES) | 1) * _MORE_CODES
    return [
        ((tokens, features), x.dtype),
        ((tokens + _MORE_ROWS, columns), torch.uint8),
        ((tokens, FACTORS), torch.float32),
    ]


def _gated(a: Arguments) -> Results:
    rows, width = a["x"].shape
    return [((rows, width // 2), a["x"].dtype)]


def _context(a: Arguments) -> Results:
    qkv, num_heads = a["qkv"], a["num_heads"]
    head_dim = qkv.shape[1] // (num_heads + 2 * (a["num_kv_heads"] or num_heads))
    return [((qkv.shape[0], num_heads * head_dim), qkv.dtype)]


def _paged_context(a: Arguments) -> Results:
    return [((a["qkv"].shape[0], a["num_heads"] * a["key_cache"].shape[3]), a["qkv"].dtype)]


def _tiles(a: Arguments) -> Results:
    columns = 3 if a["key_lengths"] is None else 4
    return [((a["cu_seqlens"].shape[0] + a["qkv"].shape[0], columns), torch.int32)]


def _paged_tiles(a: Arguments) -> Results:
    return [((a["cu_seqlens"].shape[0] * 2 + a["qkv"].shape[0], 5), torch.int32)]


def _selected(a: Arguments) -> Results:
    return [((*a["rows"].shape, *a["x"].shape[1:]), a["x"].dtype)]


def _of_sequences(a: Arguments) -> Sequence[Any]:
    return a["cu_seqlens"].shape[0] - 1, a["x"].shape[1]


def _term_weights(a: Arguments) -> Results:
    x, terms = a["x"], a["weight"].shape[1]
    scratch = (x.shape[0], min(terms, SLICE_TERMS)), x.dtype
    return [((a["cu_seqlens"].shape[0] - 1, terms), torch.float32), scratch]


def _of_groups(a: Arguments) -> Results:
    return [((a["x"].shape[0], a["weight"].shape[1]), a["x"].dtype)]


def _routes(a: Arguments) -> Results:
    (tokens, experts), count = a["logits"].shape, a["count"]
    return [
        ((tokens, count), torch.float32),
        ((tokens, count), torch.int32),
        ((tokens * count,), torch.int32),
        ((experts + 1,), torch.int32),
    ]


def _summed(a: Arguments) -> Results:
    return [((a["places"].shape[0], a["x"].shape[1]), a["x"].dtype)]


def _activated(a: Arguments) -> Results:
    features = a["weight"].shape[1] // (2 if a["is_gated"] else 1)
    return [((a["x"].shape[0], features), a["x"].dtype)]


def _next_tokens(a: Arguments) -> Results:
    (rows,), (_, vocabulary) = a["rows"].shape, a["weight"].shape
    return [((rows, vocabulary), torch.float32), ((rows,), torch.int32)]


def _joined(a: Arguments) -> Results:
    left, right = a["left"], a["right"]
    return [((left.shape[0], left.shape[1] + right.shape[1]), left.dtype)]


def _kind(a: Arguments) -> int:
    return ACTIVATIONS[a["kind"]]


def _is_slow(features: int) -> Runs:
    """Whether torch is slower; not by rows: a row keeps its bits."""

    def is_slow(operands: Sequence[Any], attributes: Arguments) -> bool:
        if attributes.get("kind") != "gelu_tanh":
            return False
        x = operands[0] if operands else attributes["x"]
        return bool(x.shape[1] >= features)

    return is_slow


def _are_whole(first: int) -> Runs:
    """Whether the caches, this operand and the next one, need no copy."""
    return lambda operands, _: all(map(Tensor.is_contiguous, operands[first : first + 2]))


def _bytes_behind(axes: int) -> Callable[[Arguments], int]:
    """Return the bytes of the memory at one place of these first axes."""
    return lambda a: a["memory"].shape[axes:].numel() * a["memory"].element_size()


def _head_dim(a: Arguments) -> int:
    heads: int = a["num_heads"] + 2 * a["num_kv_heads"]
    return int(a["qkv"].shape[1]) // heads


_CACHES: Mapping[str, Any] = {
    "keys": "key_cache",
    "values": "value_cache",
    "block_size": lambda a: a["key_cache"].shape[2],
    "head_dim": lambda a: a["key_cache"].shape[3],
}
_TOKENS: Mapping[str, Any] = {"ids": "token_ids", "table": "token_table"}


def _fields(operand: str, names: str, prefix: str = "") -> dict[str, Any]:
    """Return the fields of an operand as arguments of a function."""
    return {prefix + name: f"{operand}.{name}" for name in names.split()}


def _int8_op(
    specification: Callable[..., torch.Tensor], function: Function, kind: Any, name: str
) -> Op:
    """Return a layer that makes codes of its rows and multiplies them."""
    quantize = functions.QUANTIZE_ROWS.of(**_fields("layer", "outliers levels"))
    multiply = function.of(panels="layer.codes", kind=kind, **_fields("layer", "scale fp32_rows"))
    calls, results = (quantize, multiply), "out codes factors"
    return Op(specification, _int8_product, "cpu", *calls, name=name, results=results, scratch=2)


_ROWS = (
    Op(
        reference.embed,
        _embedded,
        "fused",
        functions.GATHER.of(**_TOKENS, ids_2="position_ids", table_2="position_table"),
    ),
    Op(
        reference.embed_layer_norm,
        _embedded,
        _BOTH,
        functions.GATHER.of(
            **_TOKENS,
            ids_2="position_ids",
            table_2="position_table",
            ids_3="type_ids",
            table_3="type_table",
            scale=1.0,
        ),
        functions.NORM.of(x="out", total="out", is_rms=0, residual=None),
    ),
    Op(
        reference.layer_norm,
        _normed,
        _BOTH,
        functions.NORM.of(total="out", is_rms=0),
        in_place=(0,),
    ),
    Op(
        reference.add_layer_norm,
        _normed,
        _BOTH,
        functions.NORM.of(total="out", is_rms=0),
        in_place=(0,),
    ),
    # the sum over `residual`, the norm over `x`
    Op(
        reference.residual_layer_norm,
        _sum_and_normed,
        _BOTH,
        functions.NORM.of(is_rms=0),
        in_place=(1, 0),
        results="total out",
    ),
    Op(reference.rms_norm, _normed, _BOTH, functions.NORM.of(total="out", is_rms=1), in_place=(0,)),
    Op(
        reference.residual_rms_norm,
        _sum_and_normed,
        _BOTH,
        functions.NORM.of(is_rms=1),
        in_place=(1, 0),
        results="total out",
    ),
    Op(reference.linear, _product, "cpu fused"),
    Op(reference.linear, _product, "cpu", name="linear_widened"),
    Op(reference.linear, None, "cpu", name="linear_packed"),
    Op(
        reference.linear,
        _panel_product,
        "cpu",
        functions.MULTIPLY.of(panels="weight.panels", kind=NO_ACTIVATION),
        name="linear_panels",
    ),
    Op(reference.linear_activate, _product, _BOTH),
    Op(
        reference.linear_activate,
        _panel_product,
        "cpu",
        functions.MULTIPLY.of(panels="weight.panels", kind=_kind),
        name="linear_panels_activate",
    ),
    Op(
        reference.linear,
        _panel_product,
        "cpu",
        functions.MULTIPLY_BLOCKS.of(**_fields("weight", "panels scales order table size bits")),
        name="linear_blocks",
    ),
    *(
        _int8_op(specification, function, kind, name + suffix)
        for name, function in (
            ("linear_int8_panels", functions.MULTIPLY_INT8),
            ("linear_int4_panels", functions.MULTIPLY_INT4),
        )
        for specification, kind, suffix in (
            (linear_int8, NO_ACTIVATION, ""),
            (linear_int8_activate, _kind, "_activate"),
        )
    ),
    Op(reference.linear_groups, _of_groups, "fused"),
    Op(
        reference.linear_groups,
        _panel_product,
        "cpu",
        functions.MULTIPLY_GROUPS.of(panels="weight.panels"),
        name="linear_groups_panels",
    ),
    Op(
        reference.route_tokens,
        _routes,
        "cpu",
        functions.CHOOSE_EXPERTS.of(),
        functions.SORT_CHOICES.of(),
        results="weights places rows cu_groups",
    ),
    Op(reference.sum_experts, _summed, "cpu", functions.SUM_EXPERTS.of()),
    Op(
        reference.activate,
        _like("x"),
        _BOTH,
        functions.ACTIVATE.of(kind=_kind),
        in_place=(0,),
        runs=_is_slow(_LEAST_FEATURES),
    ),
    Op(
        reference.activate_gate,
        _gated,
        _BOTH,
        functions.ACTIVATE.of(kind=_kind),
        runs=_is_slow(2 * _LEAST_FEATURES),
    ),
    Op(reference.tanh, _like("x"), "cpu", functions.TANH.of(), in_place=(0,)),
    Op(reference.norm_heads, _like("qkv"), "fused", in_place=(0,)),
    Op(
        reference.rotary,
        _like("qkv"),
        "fused",
        functions.ROTATE.of(heads=lambda a: a["num_heads"] + a["num_kv_heads"], head_dim=_head_dim),
        in_place=(0,),
    ),
    Op(
        reference.append_kv,
        # without positions, queries stay as they are
        lambda a: [] if a["cos_sin"] is None else [(a["qkv"].shape, a["qkv"].dtype)],
        _BOTH,
        functions.APPEND.of(**_CACHES),
        in_place=(0,),
        runs=_are_whole(2),
    ),
    Op(reference.attention_tiles, _tiles, "fused"),
    Op(
        reference.attention_varlen,
        _context,
        _BOTH,
        functions.ATTEND.of(
            where=lambda a: a["distances"] is None,
            num_kv_heads=lambda a: a["num_kv_heads"] or a["num_heads"],
            is_causal="causal",
        ),
        functions.ATTEND_DISTANCES.of(
            where=lambda a: a["distances"] is not None,
            is_causal="causal",
            **_fields("distances", "rows keys queries", "distance_"),
        ),
    ),
    Op(reference.paged_tiles, _paged_tiles, "fused"),
    Op(
        reference.attention_paged,
        _paged_context,
        _BOTH,
        functions.ATTEND_TOKENS.of(queries="qkv", blocks="block_ids", **_CACHES),
        functions.ATTEND_CHUNKS.of(queries="qkv", blocks="block_ids", **_CACHES),
        runs=_are_whole(1),
    ),
    # a pass over the program of a GPU puts these in the place of others, see `execution.cuda.step_fusion`
    Op(reference.norm_append_kv, _product, "fused"),
    Op(reference.linear_residual, _product, "fused", in_place=(3,)),
    Op(reference.norm_linear, _activated, "fused"),
    Op(reference.norm_next_tokens, _next_tokens, "fused", results="logits tokens"),
    Op(reference.masked_softmax, _like("x"), "fused", in_place=(0,)),
    # the recorder declares the number of scores
    Op(reference.attention_padded, None, "fused", results="out scores by_head"),
    Op(
        reference.copy_blocks,
        None,
        _BOTH,
        functions.COPY_BLOCKS.of(
            block_bytes=_bytes_behind(2),
            cache_bytes=_bytes_behind(1),
        ),
        check=check_copies,
    ),
    Op(reference.all_reduce, _like("x"), "cpu", functions.ALL_REDUCE.of(), in_place=(0,)),
    Op(
        reference.gather_columns,
        lambda a: [((a["x"].shape[0], a["width"]), a["x"].dtype)],
        "cpu",
        functions.GATHER_COLUMNS.of(),
    ),
    Op(
        reference.local_ids,
        _like("token_ids"),
        "",
        functions.LOCAL_IDS.of(ids="token_ids", begin="first"),
    ),
    Op(reference.select_rows, _selected, "", functions.GATHER.of(ids="rows", table="x", scale=1.0)),
    Op(
        reference.add_adapters,
        _like("y"),
        "cpu",
        functions.COPY_APART.of(x="y"),
        functions.ADD_ADAPTERS.of(
            ranks=lambda a: a["first"].shape[2],
            width=lambda a: 0 if a["second"] is None else a["second"].shape[2],
        ),
        in_place=(0,),
    ),
    Op(
        reference.pool,
        lambda a: [(_of_sequences(a), torch.float32)],
        _BOTH,
        functions.POOL.of(mode=lambda a: POOLINGS.index(a["mode"])),
    ),
    Op(
        reference.first_tokens,
        lambda a: [(_of_sequences(a), a["x"].dtype)],
        _BOTH,
        functions.FIRST_TOKENS.of(mode=POOLINGS.index("cls")),
    ),
    Op(
        reference.window_rows,
        lambda a: [((a["x"].shape[0], a["size"] * a["x"].shape[1]), a["x"].dtype)],
    ),
    Op(reference.to_fp32, lambda a: [(a["x"].shape, torch.float32)], "", functions.WIDEN.of()),
    Op(reference.add, _like("x"), in_place=(0,)),
    Op(reference.add_scaled, lambda a: [(a["x"].shape, torch.float32)]),
    Op(reference.round_tanh, _like("x"), in_place=(0,)),
    Op(reference.concat, _joined),
    Op(reference.normalize_rows, _like("x")),
    Op(reference.term_weights, _term_weights, "fused", results="out scratch"),
    Op(
        reference.bidirectional_lstm,
        lambda a: [((a["x"].shape[0], 2 * a["hidden_weight"].shape[2]), a["x"].dtype)],
    ),
    Op(reference.gru_states, _like("labels")),
    Op(
        reference.count_labels,
        lambda a: [(a[name].shape, a[name].dtype) for name in ("labels", "offsets")],
        results="kept made",
    ),
    # models declare the number of pairs
    Op(reference.span_scores, None),
    Op(reference.word_scores, None),
    Op(reference.top_terms, lambda a: [((a["x"].shape[0], 2, a["count"]), torch.float32)]),
    Op(
        reference.sample_tokens,
        lambda a: [((a["logits"].shape[0],), torch.int32)],
        _BOTH,
        functions.SAMPLE.of(),
        check=check_sampling,
    ),
    Op(
        reference.edit_logits,
        None,
        _BOTH,
        functions.EDIT_LOGITS.of(
            **_fields("begun", "tokens counts biases", "begun_"),
            **_fields("state", "tokens counts biases sizes"),
        ),
        check=check_edits,
    ),
    Op(reference.beam_step, None, _BOTH),
    Op(
        reference.follow_beams,
        None,
        _BOTH,
        functions.FOLLOW_BEAMS.of(**_fields("state", "tables parents tokens")),
    ),
    Op(
        reference.advance_searches,
        None,
        _BOTH,
        functions.ADVANCE_SEARCHES.of(
            found_tokens="found.tokens",
            logprobs="found.scores",
            heads=lambda a: torch.empty(len(a["out"].beams), dtype=torch.int32),
            **_fields("state", "parents tokens scores answers answer_scores num_answers"),
            **_fields("out", "ends beams scores", "out_"),
        ),
    ),
)

# The ops, by name.
OPS: Mapping[str, Op] = {op.name: op for op in _ROWS}

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

from varlen_kernels import Activation, Pooling, reference
from varlen_kernels.op import (
    Arguments,
    Call,
    Extent,
    Function,
    Op,
    Results,
    Runs,
    Work,
    WorkOf,
    work_of_rows,
)
from varlen_kernels.reference.linear_int8 import linear_int8, linear_int8_activate
from varlen_kernels.reference.logit_edits import check_edits
from varlen_kernels.reference.paged import check_copies
from varlen_kernels.reference.sampling import check_sampling
from varlen_kernels.reference.vocabulary import SLICE_TERMS

# Numbers of activations in machine code.
NO_ACTIVATION, GELU, GELU_TANH, SILU, RELU = range(5)
ACTIVATIONS: Mapping[Activation, int] = {
    "gelu": GELU,
    "gelu_tanh": GELU_TANH,
    "silu": SILU,
    "relu": RELU,
}
# Poolings by their number in machine code: means come last.
POOLINGS: tuple[Pooling, ...] = ("cls", "last", "max", "sum", "mean", "mean_sqrt", "weighted_mean")
# Tokens of a block of a product: their rows stay in the second-level cache while each panel of a weight passes. A
# multiple of the rows of every tile.
BLOCK = 96
# What the ranks and the width of tables for adapters are multiples of: columns that products read at a time.
RANK_STEP, WIDTH_STEP = 16, 64

# Multiplications that take as long as reading a number of a weight; as one head of a sequence's cache; as one logit of
# a choice by chance; as one logit of a beam step; as one number that is pooled.
_OF_WEIGHT, _OF_HEAD, _OF_SAMPLED, _OF_SEARCHED, _OF_POOLED = 8, 1 << 16, 128, 64, 4
# Features of an activation below which torch runs it: for one token the call of compiled code takes longer.
_LEAST_FEATURES = 1024

# Forms of most ops.
_BOTH = "cpu fused"


def _beams(extents: Sequence[Extent], _: Sequence[float]) -> Work:
    """A unit is a sequence, whose beams have a row of logits each."""
    (rows, columns), (sequences, _beams) = extents[:2]
    return Work(sequences, _OF_SEARCHED * rows * columns)


def _panels(divisor: int) -> WorkOf:
    """A unit is a panel of a block of rows."""

    def work(extents: Sequence[Extent], _: Sequence[float]) -> Work:
        (rows, _hidden), (panels, numbers) = extents[:2]
        multiplications = (rows + _OF_WEIGHT) * panels * numbers // divisor
        return Work(-(-rows // BLOCK) * panels, multiplications)

    return work


def _panels_of_groups(extents: Sequence[Extent], _: Sequence[float]) -> Work:
    """A unit is a panel of a group."""
    (rows, _hidden), (panels, numbers), (bounds, _one) = extents[:3]
    read = rows + _OF_WEIGHT * min(rows, bounds - 1)
    return Work(panels, read * panels * numbers // max(1, bounds - 1))


def _rows_of_groups(extents: Sequence[Extent], _: Sequence[float]) -> Work:
    """A unit is a row of a group."""
    (rows, _one), (bounds, _one), (_slots, first), (_slots, second) = extents[1:5]
    read = rows + _OF_WEIGHT * min(rows, bounds - 1)
    return Work(rows, read * (first + second))


def _heads_of_contexts(extents: Sequence[Extent], constants: Sequence[float]) -> Work:
    """A unit is a key head of a sequence."""
    (tokens, _), (sequences, _), num_kv_heads = extents[0], extents[4], int(constants[1])
    return Work(sequences * num_kv_heads, _OF_HEAD * tokens * num_kv_heads)


def _heads_of_sequences(place: int) -> WorkOf:
    """A unit is a head of a sequence; the constant in this place counts them."""

    def work(extents: Sequence[Extent], constants: Sequence[float]) -> Work:
        (tokens, columns), sequences = extents[0], extents[1][0] - 1
        multiplications = tokens * tokens // max(1, sequences) * columns
        return Work(sequences * int(constants[place]), multiplications)

    return work


def _one_unit(extents: Sequence[Extent], _: Sequence[float]) -> Work:
    """One thread does it all."""
    return Work(1, extents[0][0] * extents[0][1])


_NORM = Function(
    "norm",
    "x:matrix residual:matrix weight:row bias:row total=matrix out=matrix eps:real is_rms:flag",
    work_of_rows(-1),
)
# the second half of a row of x, if it has one, is a factor
_ACTIVATE = Function("activate", "x:matrix bias:row out=matrix kind:whole", work_of_rows(-1))
_GATHER = Function(
    "gather",
    "ids:ids table:matrix ids_2:ids table_2:matrix ids_3:ids table_3:matrix out=matrix scale:real",
    work_of_rows(-1),
)
_COPY_APART = Function(
    "copy_apart",
    "x:matrix x_address:address_of_x out=matrix out_address:address_of_out",
    # nothing to share: in a program there is seldom something to copy
    lambda _extents, _constants: Work(1, 0),
)
_LOCAL_IDS = Function("local_ids", "ids:ids out=ids begin:whole count:whole", work_of_rows(-1))
_ROTATE = Function(
    "rotate",
    "qkv:matrix position_ids:ids cos_sin:fp32 no_weight:row out=matrix heads:whole head_dim:whole",
    work_of_rows(-1),
)
_MULTIPLY = Function(
    "multiply", "x:matrix panels:matrix bias:row out=matrix kind:whole", _panels(1)
)
# a word has four or eight codes; it takes eight multiplications to read one
_MULTIPLY_BLOCKS = Function(
    "multiply_blocks",
    "x:matrix panels:int32 scales:fp32 bias:row order:ids table:fp32_row out=matrix size:whole"
    " bits:whole",
    _panels(1),
)
_MULTIPLY_GROUPS = Function(
    "multiply_groups",
    "x:matrix panels:matrix cu_groups:ids bias:matrix out=matrix",
    _panels_of_groups,
)
_ADD_ADAPTERS = Function(
    "add_adapters",
    "x:matrix rows:ids cu_groups:ids first:of_ranks second:of_width spans:int32 bias:matrix out=matrix"
    " ranks:whole width:whole",
    _rows_of_groups,
)
_CHOOSE_EXPERTS = Function(
    "choose_experts", "logits:fp32 weights=fp32 places=int32 normalize:whole", work_of_rows(0)
)
_SORT_CHOICES = Function("sort_choices", "places=int32 rows=ids cu_groups=ids", _one_unit)
_SUM_EXPERTS = Function(
    "sum_experts", "x:matrix weights:fp32 places:int32 bias:row out=matrix", work_of_rows(-1)
)
_POOL = Function(
    "pool",
    "x:matrix cu_seqlens:ids normalize:flags unpooled_lengths:ids rows:ids out=fp32 mode:whole",
    # a unit is a sequence
    lambda extents, _: Work(extents[-1][0], _OF_POOLED * extents[0][0] * extents[0][1]),
)
_WIDEN = Function("widen", "x:matrix out=fp32", work_of_rows(-1))
_OF_INT8 = (
    "x:fp32 panels:{} scale:fp32_row fp32_rows:fp32 outliers:int64_vector out=fp32 levels:whole"
    " kind:whole"
)
_MULTIPLY_INT8 = Function("multiply_int8", _OF_INT8.format("int8"), _panels(2), "multiply_codes")
# a byte has two codes of 4 bits
_MULTIPLY_INT4 = Function("multiply_int4", _OF_INT8.format("uint8"), _panels(1), "multiply_codes")
QUANTIZE = Function(
    "quantize",
    "x:fp32 outliers:int64_vector codes=uint8 factors=fp32 levels:whole lowest:whole",
    work_of_rows(0, 0),
)
_OF_SUMS = "sums:{} factors:fp32 scale:fp32_row fp32_rows:fp32 out=fp32"
DEQUANTIZE = Function("dequantize", _OF_SUMS.format("fp32"), work_of_rows(0, 0))
DEQUANTIZE_INT32 = Function(
    "dequantize_int32", _OF_SUMS.format("int32"), work_of_rows(0, 0), "dequantize"
)
_APPEND = Function(
    "append",
    "qkv:matrix slots:int64_vector keys=cache values=cache position_ids:ids cos_sin:fp32"
    " query_weight:row key_weight:row out=matrix num_heads:whole num_kv_heads:whole block_size:whole"
    " head_dim:whole eps:real",
    work_of_rows(0),
)
_ATTEND_TOKENS, _ATTEND_CHUNKS = (
    Function(
        name,
        "queries:matrix keys:cache values:cache cu_seqlens:ids context_lens:ids blocks:ids"
        " cu_blocks:ids bias:bias out=matrix num_heads:whole num_kv_heads:whole block_size:whole"
        " head_dim:whole scale:real window:whole soft_cap:real",
        _heads_of_contexts,
    )
    for name in ("attend_tokens", "attend_chunks")
)
_ATTEND, _ATTEND_ROUNDED = (
    Function(
        name,
        f"qkv:{kind} factors:{factors} cu_seqlens:ids bias:bias key_lengths:ids out={kind}"
        " num_heads:whole num_kv_heads:whole scale:real is_causal:flag window:whole soft_cap:real",
        _heads_of_sequences(1),
        "attend",
    )
    for name, kind, factors in (
        ("attend", "matrix", "like_qkv"),
        ("attend_rounded", "fp32", "halves"),
    )
)
_ATTEND_DISTANCES, _ATTEND_DISTANCES_ROUNDED = (
    Function(
        name,
        f"qkv:{kind} factors:{factors} cu_seqlens:ids bias:bias distance_rows:ids"
        f" distance_keys:{kind} distance_queries:{kind} key_lengths:ids out={kind} num_heads:whole"
        " scale:real is_causal:flag window:whole",
        _heads_of_sequences(0),
        "attend_distances",
    )
    for name, kind, factors in (
        ("attend_distances", "matrix", "like_qkv"),
        ("attend_distances_rounded", "fp32", "halves"),
    )
)
_COPY_BLOCKS = Function(
    "copy_blocks",
    "memory=memory copies:int32 block_bytes:whole cache_bytes:whole",
    work_of_rows(0, 0),
)
_ALL_REDUCE, _GATHER_COLUMNS = (
    Function(
        name,
        "x:matrix x_address:address_of_x ranks=ranks out=matrix out_address:address_of_out"
        " rank:whole size:whole",
        _one_unit,
    )
    for name in ("all_reduce", "gather_columns")
)
_SAMPLE = Function(
    "sample",
    "logits:fp32 bits:bits_of_logits temperature:fp32_vector top_k:ids top_p:fp32_vector"
    " min_p:fp32_vector uniform:fp64_vector out=ids",
    work_of_rows(0, _OF_SAMPLED),
)
_EDIT_LOGITS = Function(
    "edit_logits",
    "token_ids:ids logit_rows:ids rows:int32 penalties:fp32 begun_tokens:ids begun_counts:ids"
    " begun_biases:fp32_vector logits=fp32 tokens=int32 counts=int32 biases=fp32 sizes=ids",
    work_of_rows(2, 0),
)
STEP_BEAMS = Function(
    "step_beams",
    "logits:fp32 beam_scores:fp32 finished:flags bounds:int64_vector edit_tokens:ids"
    " edit_factors:fp32_vector tokens=int32 parents=int32 scores=fp32",
    _beams,
)
_FOLLOW_BEAMS = Function(
    "follow_beams",
    "searches:int32 beam_slots:ids given:int32 context_lens:ids cu_blocks:ids tables=of_beams"
    " parents=int32 tokens=int32 token_ids=ids block_ids=ids slots=int64_vector copies=int32"
    " block_size:whole",
    work_of_rows(0, 0),
)
_ADVANCE_SEARCHES = Function(
    "advance_searches",
    "found_tokens:int32 logprobs:fp32 searches:int32 beam_slots:ids divisors:fp32 ends:ids"
    " parents=int32 tokens=int32 scores=fp32 answers=of_beams answer_scores=fp32 num_answers=int32"
    " heads=ids out_ends=int32 out_beams=int32 out_scores=fp32_vector",
    work_of_rows(2, 0),
)


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


def _int8_product(a: Arguments) -> Results:
    return [((a["x"].shape[0], a["layer"].scale.shape[0]), torch.float32)]


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


def _layer(function: Function, kind: Any) -> Call:
    given = _fields("layer", "scale fp32_rows outliers levels")
    return function.of(panels="layer.codes", kind=kind, **given)


_ROWS = (
    Op(
        reference.embed,
        _embedded,
        "fused",
        _GATHER.of(**_TOKENS, ids_2="position_ids", table_2="position_table"),
    ),
    Op(
        reference.embed_layer_norm,
        _embedded,
        _BOTH,
        _GATHER.of(
            **_TOKENS,
            ids_2="position_ids",
            table_2="position_table",
            ids_3="type_ids",
            table_3="type_table",
            scale=1.0,
        ),
        _NORM.of(x="out", total="out", is_rms=0, residual=None),
    ),
    Op(reference.layer_norm, _normed, _BOTH, _NORM.of(total="out", is_rms=0), in_place=(0,)),
    Op(reference.add_layer_norm, _normed, _BOTH, _NORM.of(total="out", is_rms=0), in_place=(0,)),
    # the sum over `residual`, the norm over `x`
    Op(
        reference.residual_layer_norm,
        _sum_and_normed,
        _BOTH,
        _NORM.of(is_rms=0),
        in_place=(1, 0),
        results="total out",
    ),
    Op(reference.rms_norm, _normed, _BOTH, _NORM.of(total="out", is_rms=1), in_place=(0,)),
    Op(
        reference.residual_rms_norm,
        _sum_and_normed,
        _BOTH,
        _NORM.of(is_rms=1),
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
        _MULTIPLY.of(panels="weight.panels", kind=NO_ACTIVATION),
        name="linear_panels",
    ),
    Op(reference.linear_activate, _product, _BOTH),
    Op(
        reference.linear_activate,
        _panel_product,
        "cpu",
        _MULTIPLY.of(panels="weight.panels", kind=_kind),
        name="linear_panels_activate",
    ),
    Op(
        reference.linear,
        _panel_product,
        "cpu",
        _MULTIPLY_BLOCKS.of(**_fields("weight", "panels scales order table size bits")),
        name="linear_blocks",
    ),
    Op(linear_int8, _int8_product, "cpu"),
    Op(linear_int8, _int8_product, "cpu", name="linear_int8_packed"),
    *(
        Op(linear_int8, _int8_product, "cpu", _layer(function, NO_ACTIVATION), name=name)
        for name, function in (
            ("linear_int8_panels", _MULTIPLY_INT8),
            ("linear_int4_panels", _MULTIPLY_INT4),
        )
    ),
    *(
        Op(linear_int8_activate, _int8_product, "cpu", _layer(function, _kind), name=name)
        for name, function in (
            ("linear_int8_panels_activate", _MULTIPLY_INT8),
            ("linear_int4_panels_activate", _MULTIPLY_INT4),
        )
    ),
    Op(reference.linear_groups, _of_groups, "fused"),
    Op(
        reference.linear_groups,
        _panel_product,
        "cpu",
        _MULTIPLY_GROUPS.of(panels="weight.panels"),
        name="linear_groups_panels",
    ),
    Op(
        reference.route_tokens,
        _routes,
        "cpu",
        _CHOOSE_EXPERTS.of(),
        _SORT_CHOICES.of(),
        results="weights places rows cu_groups",
    ),
    Op(reference.sum_experts, _summed, "cpu", _SUM_EXPERTS.of()),
    Op(
        reference.activate,
        _like("x"),
        _BOTH,
        _ACTIVATE.of(kind=_kind),
        in_place=(0,),
        runs=_is_slow(_LEAST_FEATURES),
    ),
    Op(
        reference.activate_gate,
        _gated,
        _BOTH,
        _ACTIVATE.of(kind=_kind),
        runs=_is_slow(2 * _LEAST_FEATURES),
    ),
    Op(reference.tanh, _like("x"), in_place=(0,)),
    Op(reference.norm_heads, _like("qkv"), "fused", in_place=(0,)),
    Op(
        reference.rotary,
        _like("qkv"),
        "fused",
        _ROTATE.of(heads=lambda a: a["num_heads"] + a["num_kv_heads"], head_dim=_head_dim),
        in_place=(0,),
    ),
    Op(
        reference.append_kv,
        # without positions, queries stay as they are
        lambda a: [] if a["cos_sin"] is None else [(a["qkv"].shape, a["qkv"].dtype)],
        _BOTH,
        _APPEND.of(**_CACHES),
        in_place=(0,),
        runs=_are_whole(2),
    ),
    Op(reference.attention_tiles, _tiles, "fused"),
    *(
        Op(
            reference.attention_varlen,
            _context,
            forms,
            plain.of(
                where=lambda a: a["distances"] is None,
                num_kv_heads=lambda a: a["num_kv_heads"] or a["num_heads"],
                is_causal="causal",
            ),
            with_distances.of(
                where=lambda a: a["distances"] is not None,
                is_causal="causal",
                **_fields("distances", "rows keys queries", "distance_"),
            ),
            name=name,
        )
        for name, forms, plain, with_distances in (
            ("attention_varlen", _BOTH, _ATTEND, _ATTEND_DISTANCES),
            # of programs in int8: factors are bf16 where the CPU multiplies it
            ("attention_rounded", "cpu", _ATTEND_ROUNDED, _ATTEND_DISTANCES_ROUNDED),
        )
    ),
    Op(reference.paged_tiles, _paged_tiles, "fused"),
    Op(
        reference.attention_paged,
        _paged_context,
        _BOTH,
        _ATTEND_TOKENS.of(queries="qkv", blocks="block_ids", **_CACHES),
        _ATTEND_CHUNKS.of(queries="qkv", blocks="block_ids", **_CACHES),
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
        _COPY_BLOCKS.of(
            block_bytes=_bytes_behind(2),
            cache_bytes=_bytes_behind(1),
        ),
        check=check_copies,
    ),
    Op(reference.all_reduce, _like("x"), "cpu", _ALL_REDUCE.of(), in_place=(0,)),
    Op(
        reference.gather_columns,
        lambda a: [((a["x"].shape[0], a["width"]), a["x"].dtype)],
        "cpu",
        _GATHER_COLUMNS.of(),
    ),
    Op(reference.local_ids, _like("token_ids"), "", _LOCAL_IDS.of(ids="token_ids", begin="first")),
    Op(reference.select_rows, _selected, "", _GATHER.of(ids="rows", table="x", scale=1.0)),
    Op(
        reference.add_adapters,
        _like("y"),
        "cpu",
        _COPY_APART.of(x="y"),
        _ADD_ADAPTERS.of(
            ranks=lambda a: a["first"].shape[2],
            width=lambda a: 0 if a["second"] is None else a["second"].shape[2],
        ),
        in_place=(0,),
    ),
    Op(
        reference.pool,
        lambda a: [(_of_sequences(a), torch.float32)],
        _BOTH,
        _POOL.of(mode=lambda a: POOLINGS.index(a["mode"])),
    ),
    Op(reference.first_tokens, lambda a: [(_of_sequences(a), a["x"].dtype)], "fused"),
    Op(
        reference.window_rows,
        lambda a: [((a["x"].shape[0], a["size"] * a["x"].shape[1]), a["x"].dtype)],
    ),
    Op(reference.to_fp32, lambda a: [(a["x"].shape, torch.float32)], "", _WIDEN.of()),
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
        _SAMPLE.of(),
        check=check_sampling,
    ),
    Op(
        reference.edit_logits,
        None,
        _BOTH,
        _EDIT_LOGITS.of(
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
        _FOLLOW_BEAMS.of(**_fields("state", "tables parents tokens")),
    ),
    Op(
        reference.advance_searches,
        None,
        _BOTH,
        _ADVANCE_SEARCHES.of(
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
# Compiled functions by name: functions of ops, and some that no row names.
FUNCTIONS: Mapping[str, Function] = {
    function.name: function
    for function in (
        *(call.function for op in _ROWS for call in op.calls),
        *(QUANTIZE, DEQUANTIZE, DEQUANTIZE_INT32, STEP_BEAMS),
    )
}
# The names of all machine code: of functions, and of what runs a table of them.
RUNNERS = ("run_shared", "run_alone")
ENTRIES = (*(entry for each in FUNCTIONS.values() for entry in each.entries), *RUNNERS)

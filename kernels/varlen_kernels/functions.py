"""The compiled functions of CPUs: arguments as they lie in memory, and work.

Rows of `op_table` say which ops they run, and `cpu.bodies` has their code. A process that only runs a table of calls
imports this, and no torch.
"""

from collections.abc import Mapping, Sequence

from varlen_kernels import Activation, Pooling
from varlen_kernels.op import Extent, Function, Work, WorkOf, work_of_rows

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
# Token of a beam where there is no candidate, and most candidates of a sequence in a step.
NO_TOKEN, MAX_WIDTH = -1, 128
# Flags of a search: the token that is chosen is the last one; it ends once there are as many answers as beams.
IS_LAST, ENDS_WHEN_FULL = 1, 2
# Columns of `follow_beams`: row of the first beam of a search, number of beams, tokens of each beam with the one of
# this step, and number of the first beam among all beams.
FOLLOW_COLUMNS = 4
# A token that is chosen on the device.
NOT_GIVEN = -1
# What the ranks and the width of tables for adapters are multiples of: columns that products read at a time.
RANK_STEP, WIDTH_STEP = 16, 64

# Multiplications that take as long as reading a number of a weight; as one head of a sequence's cache; as one logit of
# a choice by chance; as one logit of a beam step; as one number that is pooled.
_OF_WEIGHT, _OF_HEAD, _OF_SAMPLED, _OF_SEARCHED, _OF_POOLED = 8, 1 << 16, 128, 64, 4


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


def _sequences(extents: Sequence[Extent], _: Sequence[float]) -> Work:
    """A unit is a sequence."""
    (rows, columns), (sequences, _hidden) = extents[0], extents[-1]
    return Work(sequences, _OF_POOLED * rows * columns)


def _one_unit(extents: Sequence[Extent], _: Sequence[float]) -> Work:
    """One thread does it all."""
    return Work(1, extents[0][0] * extents[0][1])


NORM = Function(
    "norm",
    "x:matrix residual:matrix weight:row bias:row total=matrix out=matrix eps:real is_rms:flag",
    work_of_rows(-1),
)
# the second half of a row of x, if it has one, is a factor
ACTIVATE = Function("activate", "x:matrix bias:row out=matrix kind:whole", work_of_rows(-1))
GATHER = Function(
    "gather",
    "ids:ids table:matrix ids_2:ids table_2:matrix ids_3:ids table_3:matrix out=matrix scale:real",
    work_of_rows(-1),
)
COPY_APART = Function(
    "copy_apart",
    "x:matrix x_address:address_of_x out=matrix out_address:address_of_out",
    # nothing to share: in a program there is seldom something to copy
    lambda _extents, _constants: Work(1, 0),
)
LOCAL_IDS = Function("local_ids", "ids:ids out=ids begin:whole count:whole", work_of_rows(-1))
ROTATE = Function(
    "rotate",
    "qkv:matrix position_ids:ids cos_sin:fp32 no_weight:row out=matrix heads:whole head_dim:whole",
    work_of_rows(-1),
)
MULTIPLY = Function("multiply", "x:matrix panels:matrix bias:row out=matrix kind:whole", _panels(1))
# a word has four or eight codes; it takes eight multiplications to read one
MULTIPLY_BLOCKS = Function(
    "multiply_blocks",
    "x:matrix panels:int32 scales:fp32 bias:row order:ids table:fp32_row out=matrix size:whole"
    " bits:whole",
    _panels(1),
)
MULTIPLY_GROUPS = Function(
    "multiply_groups",
    "x:matrix panels:matrix cu_groups:ids bias:matrix out=matrix",
    _panels_of_groups,
)
ADD_ADAPTERS = Function(
    "add_adapters",
    "x:matrix rows:ids cu_groups:ids first:of_ranks second:of_width spans:int32 bias:matrix out=matrix"
    " ranks:whole width:whole",
    _rows_of_groups,
)
CHOOSE_EXPERTS = Function(
    "choose_experts", "logits:fp32 weights=fp32 places=int32 normalize:whole", work_of_rows(0)
)
SORT_CHOICES = Function("sort_choices", "places=int32 rows=ids cu_groups=ids", _one_unit)
SUM_EXPERTS = Function(
    "sum_experts", "x:matrix weights:fp32 places:int32 bias:row out=matrix", work_of_rows(-1)
)
POOL, FIRST_TOKENS = (
    Function(
        name,
        f"x:matrix cu_seqlens:ids normalize:flags unpooled_lengths:ids rows:ids out={kind} mode:whole",
        _sequences,
        "pool",
    )
    for name, kind in (("pool", "fp32"), ("first_tokens", "matrix"))
)
TANH = Function("tanh", "x:matrix limit:real out=matrix", work_of_rows(-1), "stretched_tanh")
WIDEN = Function("widen", "x:matrix out=fp32", work_of_rows(-1))
QUANTIZE_ROWS = Function(
    "quantize_rows",
    "x:matrix outliers:int64_vector codes=uint8 factors=fp32 levels:whole",
    work_of_rows(0),
)
_OF_INT8 = "factors:fp32 panels:{} codes:uint8 scale:fp32_row fp32_rows:fp32 out=matrix kind:whole"
MULTIPLY_INT8 = Function("multiply_int8", _OF_INT8.format("int8"), _panels(2), "multiply_codes")
# a byte has two codes of 4 bits
MULTIPLY_INT4 = Function("multiply_int4", _OF_INT8.format("uint8"), _panels(1), "multiply_codes")
CHOOSE_CODES = Function(
    "choose_codes",
    "weight:fp32 scale:fp32_vector columns:ids shares:fp32 codes=int8 largest:real",
    work_of_rows(0),
)
APPEND = Function(
    "append",
    "qkv:matrix slots:int64_vector keys=cache values=cache position_ids:ids cos_sin:fp32"
    " query_weight:row key_weight:row out=matrix num_heads:whole num_kv_heads:whole block_size:whole"
    " head_dim:whole eps:real",
    work_of_rows(0),
)
ATTEND_TOKENS, ATTEND_CHUNKS = (
    Function(
        name,
        "queries:matrix keys:cache values:cache cu_seqlens:ids context_lens:ids blocks:ids"
        " cu_blocks:ids bias:bias out=matrix num_heads:whole num_kv_heads:whole block_size:whole"
        " head_dim:whole scale:real window:whole soft_cap:real",
        _heads_of_contexts,
    )
    for name in ("attend_tokens", "attend_chunks")
)
ATTEND = Function(
    "attend",
    "qkv:matrix cu_seqlens:ids bias:bias key_lengths:ids out=matrix num_heads:whole"
    " num_kv_heads:whole scale:real is_causal:flag window:whole soft_cap:real",
    _heads_of_sequences(1),
)
ATTEND_DISTANCES = Function(
    "attend_distances",
    "qkv:matrix cu_seqlens:ids bias:bias distance_rows:ids distance_keys:matrix"
    " distance_queries:matrix key_lengths:ids out=matrix num_heads:whole scale:real is_causal:flag"
    " window:whole",
    _heads_of_sequences(0),
)
COPY_BLOCKS = Function(
    "copy_blocks",
    "memory=memory copies:int32 block_bytes:whole cache_bytes:whole",
    work_of_rows(0, 0),
)
ALL_REDUCE, GATHER_COLUMNS = (
    Function(
        name,
        "x:matrix x_address:address_of_x ranks=ranks out=matrix out_address:address_of_out"
        " rank:whole size:whole",
        _one_unit,
    )
    for name in ("all_reduce", "gather_columns")
)
SAMPLE = Function(
    "sample",
    "logits:fp32 bits:bits_of_logits temperature:fp32_vector top_k:ids top_p:fp32_vector"
    " min_p:fp32_vector uniform:fp64_vector out=ids",
    work_of_rows(0, _OF_SAMPLED),
)
EDIT_LOGITS = Function(
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
FOLLOW_BEAMS = Function(
    "follow_beams",
    "searches:int32 beam_slots:ids given:int32 context_lens:ids cu_blocks:ids tables=of_beams"
    " parents=int32 tokens=int32 token_ids=ids block_ids=ids slots=int64_vector copies=int32"
    " block_size:whole",
    work_of_rows(0, 0),
)
ADVANCE_SEARCHES = Function(
    "advance_searches",
    "found_tokens:int32 logprobs:fp32 searches:int32 beam_slots:ids divisors:fp32 ends:ids"
    " parents=int32 tokens=int32 scores=fp32 answers=of_beams answer_scores=fp32 num_answers=int32"
    " heads=ids out_ends=int32 out_beams=int32 out_scores=fp32_vector",
    work_of_rows(2, 0),
)

# All of them, by name.
FUNCTIONS: Mapping[str, Function] = {
    each.name: each for each in tuple(globals().values()) if isinstance(each, Function)
}
# The names of all machine code: of functions, and of what runs a table of them.
RUNNERS = ("run_shared", "run_alone")
ENTRIES = (*(entry for each in FUNCTIONS.values() for entry in each.entries), *RUNNERS)

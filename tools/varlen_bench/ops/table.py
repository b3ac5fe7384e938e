"""The table of ops: how each kernel is called, and what bounds its time.

Benchmarks, tuner, GPU report, compile checks and kernel tests make their calls from it, by name and sizes. The
reference names the arguments of a call.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from inspect import Parameter, signature
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from varlen_bench.ops import results
from varlen_bench.ops.call import (
    Inputs,
    Made,
    Make,
    OpCall,
    Read,
    Tensors,
    as_tensor,
    bounds,
    kernels,
    poison,
)
from varlen_kernels.functions import FOLLOW_COLUMNS, NOT_GIVEN
from varlen_kernels.op_table import OPS
from varlen_kernels.reference.attention import Distances
from varlen_kernels.reference.beam import BeamCandidates, BeamEdits
from varlen_kernels.reference.beam_search import (
    ADVANCE_COLUMNS,
    SearchResults,
    SearchState,
)
from varlen_kernels.reference.few_rows import FoldedNorm
from varlen_kernels.reference.linear_layers import CodedWeight
from varlen_kernels.reference.logit_edits import EDIT_COLUMNS, KEPT, EditLists, EditState

# Sizes of a call by name, such as `tokens`. The sizes of BERT-base are the defaults.
Sizes: TypeAlias = SimpleNamespace
Of: TypeAlias = Callable[[Sizes], Any]

# Sequences of a model that searches or edits logits, blocks of its longest table, tokens of its longest edit list.
_MOST_SEQUENCES, _MOST_BLOCKS, _MOST_ENTRIES = 256, 128, 1024
# Blocks of a model whose blocks are copied.
_BLOCKS = 128


@dataclass(frozen=True, slots=True)
class Row:
    """How an op is called; functions of the sizes return what a field says.

    Attributes:
        shape: format of the text for tables.
        options: arguments that are no tensors.
        optional: optional tensor arguments of a call that does not choose them.
        sizes: defaults that differ from BERT-base.
        tiles: the op that fills the argument `tiles`.
        out: recipe of the result, if `OPS` does not tell its shape.
        read, formula, written, moved, flops, threshold: see `OpCall`.
    """

    shape: str = "{tokens}x{hidden}"
    options: Mapping[str, Any] = field(default_factory=dict)
    optional: str = ""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    tiles: str = ""
    out: Callable[[Sizes], Make] | None = None
    read: Read = as_tensor
    formula: Callable[[Inputs], Tensor] | None = None
    written: tuple[str, ...] = ()
    moved: Of = lambda _: None
    flops: Of = lambda _: 0
    threshold: Of = lambda _: None


def op_call(
    op: str, dtype: torch.dtype, optional: str | None = None, *, shape: str = "", **given: Any
) -> OpCall:
    """Return a call of an op.

    Args:
        op: name in the table.
        optional: names of the optional tensor arguments; None for the names of the row.
        shape: text for tables, or its format; the row's if empty.
        given: sizes and options of the op. `lengths` are the tokens of each sequence; `tokens` is the length of a
            single sequence, and `batch` a number of sequences of one token.

    Raises:
        TypeError: the op has no such size or option.
    """
    row = TABLE[op]
    if unknown := given.keys() - {"lengths"} - _BERT_BASE.keys() - row.sizes.keys() - {*_names(op)}:
        raise TypeError(f"{op} has no sizes or options {', '.join(sorted(unknown))}")
    s = _sizes(
        row, dtype, given, frozenset((row.optional if optional is None else optional).split())
    )
    recipes = {name: ARGUMENTS.get(f"{op}.{name}") or ARGUMENTS.get(name) for name in _names(op)}
    inputs = {
        name: make(s)
        for name, make in recipes.items()
        if make is not None and (name in s.optional or name in _required(op))
    }
    options = {name: _at(value, s) for name, value in row.options.items() if name in recipes}
    options |= {name: given[name] for name in given if name in recipes and name not in inputs}

    def result(make: Tensors, tensors: Inputs) -> Any:
        if row.out is not None:
            return row.out(s)(make)
        declared = OPS[op]
        if declared.result is None:
            return None
        shapes = declared.result(declared.named((), {**tensors, **options}))
        found = tuple(make.unwritten(*shape, dtype=kind) for shape, kind in shapes)
        return found if len(found) > 1 else next(iter(found), None)

    def fill_tiles(ops: Any, tensors: Inputs) -> None:
        known = {**tensors, **options}
        read = {name: known[name] for name in _names(row.tiles) if name in known}
        getattr(ops, row.tiles)(**read, out=tensors["tiles"])

    return OpCall(
        op,
        (shape or row.shape).format_map(vars(s) | options),
        dtype,
        inputs,
        result,
        options,
        formula=row.formula,
        read=row.read,
        lengths=tuple(s.lengths),
        fill=fill_tiles if "tiles" in inputs else None,
        written=row.written,
        moved=row.moved(s),
        flops=row.flops(s),
        tokens=s.tokens,
        threshold=row.threshold(s),
    )


def _sizes(
    row: Row, dtype: torch.dtype, given: Mapping[str, Any], optional: frozenset[str]
) -> Sizes:
    """Return all sizes of a call; a function of earlier ones computes a later one."""
    lengths = given.get("lengths") or [given.get("tokens", 1)] * given.get("batch", 1)
    s = Sizes(lengths=lengths, dtype=dtype, itemsize=dtype.itemsize, optional=optional)
    for name, size in {**_BERT_BASE, **row.sizes, **given}.items():
        setattr(s, name, _at(size, s))
    s.context = sum(lengths)
    # heads of the keys; columns of queries, keys and values
    s.key_heads = s.kv_heads or s.heads
    s.width = (s.heads + 2 * s.key_heads) * s.head_dim
    s.all_heads = f"{s.heads}/{s.kv_heads}" if s.kv_heads else str(s.heads)
    return s


def _at(value: Any, s: Sizes) -> Any:
    return value(s) if callable(value) else value


@cache
def _parameters(op: str) -> Mapping[str, Parameter]:
    return signature(getattr(kernels("reference"), op)).parameters


def _names(op: str) -> list[str]:
    """Return the arguments of an op; a result that is required is one of them."""
    return [name for name in _parameters(op) if name != "out" or name in _required(op)]


def _required(op: str) -> list[str]:
    return [name for name, each in _parameters(op).items() if each.default is Parameter.empty]


def _unwritten(dtype: torch.dtype, *shape: int) -> Make:
    return lambda make: make.unwritten(*shape, dtype=dtype)


def _random_fp32(*shape: int) -> Make:
    return lambda make: make.random(*shape, dtype=torch.float32)


def _ids(rows: int, *shape: int) -> Make:
    return lambda make: make.ids(rows, *shape)


def _table(rows: list[list[int]], columns: int) -> Make:
    return lambda make: make.ints([number for row in rows for number in row]).view(-1, columns)


def _full(count: int, value: float) -> Make:
    return lambda make: torch.full((count,), value, device=make.device)


def _scaled(factor: float, *shape: int, dtype: torch.dtype | None = None) -> Make:
    return lambda make: make.random(*shape, dtype=dtype).mul_(factor)


def _shuffled(blocks: int) -> list[int]:
    """Return the block ids below `blocks` in a fixed random order."""
    order = list(range(blocks))
    random.Random(0).shuffle(order)
    return order


def _cos_sin(s: Sizes) -> Make:
    """Return how to make the cosines and sines of random angles for each position."""

    def made(make: Tensors) -> Tensor:
        angles = make.random(s.positions, s.head_dim // 2, dtype=torch.float32)
        return torch.cat((angles.cos(), angles.sin()), dim=1)

    return made


def _distances(s: Sizes) -> Make:
    """Return how to make keys and queries of distances; each distance has its own row."""
    count, hidden = 2 * s.longest - 1, s.heads * s.head_dim
    return lambda make: Distances(
        make.ints([*range(count)]), make.random(count, hidden), make.random(count, hidden)
    )


def _slots(s: Sizes) -> Make:
    """Return how to make slots that fill shuffled blocks in order."""
    size = s.block_size
    order = _shuffled(-(-s.tokens // size))
    slots = [order[i // size] * size + i % size for i in range(s.tokens)]
    return lambda make: make.ints(slots).long()


def _blocks(s: Sizes) -> list[int]:
    """Return the number of blocks of each sequence."""
    return [-(-length // s.block_size) for length in s.lengths]


def _cache(s: Sizes) -> tuple[int, ...]:
    return sum(_blocks(s)), s.key_heads, s.block_size, s.head_dim


def _paged_tiles(s: Sizes) -> Make:
    return _unwritten(torch.int32, s.tokens + 2 * (s.batch + 1), 5)


def _copied(s: Sizes) -> list[list[int]]:
    """Return copies of blocks into others, and of one to itself."""
    half = _BLOCKS // 2
    return [[i, half + i] for i in range(s.batch)] + [[half - 1, half - 1]]


def _read_keys(s: Sizes) -> int:
    """Return the keys that paged attention reads."""
    window = getattr(s, "window", 0)
    steps = zip(s.new, s.lengths, strict=True)
    return sum(min(length, (window or length) + count - 1) for count, length in steps)


def _pairs(s: Sizes) -> int:
    """Return the pairs of query and key of paged attention."""
    window = getattr(s, "window", 0)
    steps = zip(s.new, s.lengths, strict=True)
    ends = (end for count, length in steps for end in range(length - count + 1, length + 1))
    return sum(min(end, window or end) for end in ends)


def _append_bytes(s: Sizes) -> int:
    # queries that are not rotated are not read; weights and angles stay in the cache
    width = s.width if "cos_sin" in s.optional else 2 * s.key_heads * s.head_dim
    return int(2 * s.tokens * width * s.itemsize + 8 * s.tokens)


def _by_output(s: Sizes, hidden: int, features: int) -> Make:
    """Return how to make a weight whose inputs lie side by side, or its codes."""
    codes = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(s.codes)
    if codes is None:
        return lambda make: make.random(features, hidden).mul_(hidden**-0.5).t()

    def made(make: Tensors) -> CodedWeight:
        numbers = make.random(features, hidden, dtype=torch.float32).mul_(32).clamp_(-127, 127)
        scale = torch.full((features,), hidden**-0.5 / 32, device=make.device)
        return CodedWeight(numbers.to(codes).t(), scale)

    return made


def _folded(s: Sizes, features: int) -> Make:
    """Return how to make the norm in front of a linear layer."""

    def made(make: Tensors) -> FoldedNorm:
        gain = make.random(s.hidden)
        if s.norm == "rms":
            return FoldedNorm(gain, None, None, None)
        sums, shift = (make.random(features, dtype=torch.float32) for _ in range(2))
        return FoldedNorm(gain, gain, sums, shift)

    return made


def _edits(s: Sizes) -> Make:
    """Return how to make edits of `longest` tokens of each row."""
    rows, count = s.batch * s.beams, s.longest
    edited = [token * (s.vocabulary // count) for token in range(count)] * rows

    def made(make: Tensors) -> BeamEdits:
        factors = make.random(rows * count, dtype=torch.float32).abs_()
        of_row = [row for row in range(rows) for _ in range(count)]
        return BeamEdits(make.ints(of_row), make.ints(edited), factors)

    return made


def _search_state(make: Tensors) -> SearchState:
    """Return searches that have no answers."""
    state = SearchState.new(_MOST_SEQUENCES, _MOST_BLOCKS, make.device)
    return state._replace(scores=make.random(2, _MOST_SEQUENCES, dtype=torch.float32))


def _followed_state(s: Sizes) -> Make:
    """Return how to make searches whose every second beam is continued twice."""
    rows, count = s.batch * s.beams, s.blocks
    parents = [beam // 2 * 2 for beam in range(s.beams)] * s.batch

    def made(make: Tensors) -> SearchState:
        found = _search_state(make)
        found.parents[0, :rows] = make.ints(parents)
        # of beams with a token less
        found.tables[1, :rows, :count] = make.ints([*range(rows * count)]).view(rows, count)
        return found

    return made


def _found(s: Sizes) -> Make:
    """Return how to make the candidates that a beam step found."""
    rows, width = s.batch * s.beams, min(s.beams + 1, s.vocabulary)

    def made(make: Tensors) -> BeamCandidates:
        logprobs = make.random(rows, width, dtype=torch.float32).sort(1, descending=True).values
        tokens = make.ints([*range(width)] * rows).view(rows, width)
        return BeamCandidates(tokens, tokens, logprobs)

    return made


def _search_results(s: Sizes) -> Make:
    def made(make: Tensors) -> Any:
        numbers = SearchResults.numbers(s.batch, s.batch * s.beams, make.device)
        return poison(SearchResults.views(numbers, s.batch))

    return made


def _advanced(s: Sizes) -> list[list[int]]:
    n = s.beams
    return [[i * n, n, n, 2, 0, -1, i, i + 1, i * n] for i in range(s.batch)]


def _edit_state(s: Sizes) -> Make:
    """Return how to make edit lists of `longest` tokens on the device."""

    def made(make: Tensors) -> EditState:
        found = EditState.new(_MOST_SEQUENCES, _MOST_ENTRIES, make.device)
        found.tokens[:] = make.ints([*range(_MOST_ENTRIES)])
        found.counts[:] = make.ints([each % 3 for each in range(_MOST_ENTRIES)])
        found.biases.fill_(0.5)
        found.sizes.fill_(s.longest)
        return found

    return made


def _no_lists(make: Tensors) -> EditLists:
    return EditLists(make.ints([]), make.ints([]), make.random(0, dtype=torch.float32))


_BERT_BASE: dict[str, Any] = {
    "batch": lambda s: len(s.lengths),
    "longest": lambda s: max(s.lengths),
    # tokens of each sequence that are new
    "new": lambda s: s.lengths,
    "tokens": lambda s: sum(s.new),
    # sequences in `cu_seqlens`, as in a server's batch; those past the batch are empty
    "slots": lambda s: s.batch,
    "hidden": 768,
    "features": 3072,
    "heads": 12,
    "kv_heads": None,
    "head_dim": 64,
    "vocabulary": 1000,
    "positions": 512,
    "block_size": 16,
    "beams": 4,
}

# How to make each argument: the shape of random values, int32 values, or a function of `Tensors`; see `Made`.
ARGUMENTS: dict[str, Callable[[Sizes], Made]] = {
    "x": lambda s: (s.tokens, s.hidden),
    "activate.x": lambda s: (s.tokens, s.features),
    "activate_gate.x": lambda s: (s.tokens, 2 * s.features),
    "masked_softmax.x": lambda s: (s.batch, s.heads, s.queries, s.keys),
    "pack.x": lambda s: (s.batch, s.longest, s.hidden),
    "residual": lambda s: (s.tokens, s.hidden),
    "weight": lambda s: (s.hidden,),
    "linear_activate.weight": lambda s: (s.hidden, s.features),
    # as large as in a model: logits near 1
    "term_weights.weight": lambda s: _scaled(s.hidden**-0.5, s.hidden, s.terms),
    "linear_groups.weight": lambda s: (s.groups, s.features, s.hidden),
    "bias": lambda s: (s.hidden,),
    "activate.bias": lambda s: (s.features,),
    "linear_activate.bias": lambda s: (s.features,),
    "linear_groups.bias": lambda s: (s.groups, s.features),
    "cu_groups": lambda s: bounds([(s.tokens + i) // s.groups for i in range(s.groups)]),
    "term_weights.bias": lambda s: (s.terms,),
    # by the distance of query and key
    "attention_varlen.bias": lambda s: _random_fp32(s.heads, 2 * s.longest - 1),
    "attention_padded.bias": lambda s: _random_fp32(s.heads, 2 * s.longest - 1),
    "attention_padded.qkv": lambda s: (s.batch * s.longest, s.width),
    # each sequence, then its padding
    "attention_padded.cu_seqlens": lambda s: bounds(
        [part for length in s.lengths for part in (length, s.longest - length)]
    ),
    "attention_padded.key_lengths": lambda s: [
        part for length in s.lengths for part in (-(-length // 2), 0)
    ],
    "attention_paged.bias": lambda s: _random_fp32(s.heads, 2 * s.longest + 1),
    # embeddings
    "token_ids": lambda s: _ids(s.vocabulary, s.tokens),
    "position_ids": lambda s: _ids(s.positions, s.tokens),
    "type_ids": lambda s: _ids(2, s.tokens),
    "token_table": lambda s: (s.vocabulary, s.hidden),
    "position_table": lambda s: (s.positions, s.hidden),
    "type_table": lambda s: (2, s.hidden),
    # heads
    "qkv": lambda s: (s.tokens, s.width),
    "query_weight": lambda s: (s.head_dim,),
    "key_weight": lambda s: (s.head_dim,),
    "cos_sin": _cos_sin,
    # sequences
    "cu_seqlens": lambda s: bounds([*s.new, *[0] * (s.slots - s.batch)]),
    "seqlens": lambda s: s.lengths,
    "distances": _distances,
    # half of each sequence is read
    "key_lengths": lambda s: [-(-n // 2) for n in s.lengths] + [0] * (s.slots - s.batch),
    "attention_varlen.tiles": lambda s: _unwritten(
        torch.int32, s.tokens + s.slots + 1, 3 + ("key_lengths" in s.optional)
    ),
    "normalize": lambda s: lambda make: torch.ones(s.batch, dtype=torch.bool, device=make.device),
    "unpooled_lengths": lambda s: [2] * s.batch,
    # KV blocks
    "append_kv.slots": _slots,
    "append_kv.key_cache": lambda s: _unwritten(s.dtype, *_cache(s)),
    "append_kv.value_cache": lambda s: _unwritten(s.dtype, *_cache(s)),
    "key_cache": _cache,
    "value_cache": _cache,
    "context_lens": lambda s: s.lengths,
    "cu_blocks": lambda s: bounds(_blocks(s)),
    "block_ids": lambda s: _shuffled(sum(_blocks(s))),
    "attention_paged.tiles": _paged_tiles,
    "copy_blocks.memory": lambda s: (2 * s.layers, _BLOCKS, s.kv_heads, s.block_size, s.head_dim),
    "copy_blocks.copies": lambda s: _table(_copied(s), 2),
    # decode steps of few rows
    "linear.weight": lambda s: _by_output(s, s.hidden, s.features),
    "linear.bias": lambda s: (s.features,),
    "norm_append_kv.weight": lambda s: _by_output(s, s.hidden, s.width),
    "norm_append_kv.bias": lambda _: None,
    "norm_append_kv.norm": lambda s: _folded(s, s.width),
    "norm_append_kv.slots": _slots,
    "norm_append_kv.key_cache": lambda s: _unwritten(s.dtype, *_cache(s)),
    "norm_append_kv.value_cache": lambda s: _unwritten(s.dtype, *_cache(s)),
    "linear_residual.x": lambda s: (s.tokens, s.features),
    "linear_residual.weight": lambda s: _by_output(s, s.features, s.hidden),
    "norm_linear.weight": lambda s: _by_output(s, s.hidden, s.features),
    "norm_linear.bias": lambda _: None,
    "norm_linear.norm": lambda s: _folded(s, s.features),
    "norm_next_tokens.rows": lambda s: [*range(s.tokens)],
    "norm_next_tokens.weight": lambda s: _by_output(s, s.hidden, s.vocabulary),
    "norm_next_tokens.bias": lambda _: None,
    "norm_next_tokens.norm": lambda s: _folded(s, s.vocabulary),
    # logits
    "beam_step.logits": lambda s: _scaled(3, s.batch * s.beams, s.vocabulary),
    "logits": lambda s: _scaled(3, s.batch, s.vocabulary, dtype=torch.float32),
    "scores": lambda s: lambda make: make.random(s.batch, s.beams, dtype=torch.float32) - 10,
    "finished": lambda s: lambda make: torch.zeros(s.batch, dtype=torch.bool, device=make.device),
    "edits": _edits,
    "temperature": lambda s: _full(s.batch, s.temperature),
    "top_p": lambda s: _full(s.batch, s.top_p),
    "min_p": lambda s: _full(s.batch, s.min_p),
    "top_k": lambda s: [s.top_k] * s.batch,
    "uniform": lambda s: (
        lambda make: torch.linspace(0.01, 0.99, s.batch, dtype=torch.float64, device=make.device)
    ),
    # penalties of a step: the last token of an answer is in its list or is the next one, by turns
    "edit_logits.token_ids": lambda s: [row % 2 * s.longest for row in range(s.batch)],
    "logit_rows": lambda s: [*range(s.batch)],
    "rows": lambda s: _table([[i, i, 1, 1, KEPT, KEPT] for i in range(s.batch)], EDIT_COLUMNS),
    "penalties": lambda s: (
        lambda make: make.random(s.batch, 3, dtype=torch.float32).abs_().add_(0.5)
    ),
    "begun": lambda _: _no_lists,
    "edit_logits.state": _edit_state,
    # searches, before a step and after it
    "beam_slots": lambda s: [*range(s.batch * s.beams)],
    "follow_beams.state": _followed_state,
    "follow_beams.searches": lambda s: _table(
        [[i * s.beams, s.beams, 2, i * s.beams] for i in range(s.batch)], FOLLOW_COLUMNS
    ),
    "given": lambda s: _table([[NOT_GIVEN] * 2] * s.batch * s.beams, 2),
    "follow_beams.token_ids": lambda s: _ids(1, s.batch * s.beams),
    # in the middle of the last block
    "follow_beams.context_lens": lambda s: (
        [s.blocks * s.block_size - s.block_size // 2 + 1] * s.batch * s.beams
    ),
    "follow_beams.cu_blocks": lambda s: bounds([s.blocks] * s.batch * s.beams),
    "follow_beams.block_ids": lambda s: _ids(1, s.batch * s.beams * s.blocks),
    "follow_beams.slots": lambda s: lambda make: make.ids(1, s.batch * s.beams).long(),
    "follow_beams.copies": lambda s: _ids(1, s.batch * s.beams, 2),
    "found": _found,
    "advance_searches.searches": lambda s: _table(_advanced(s), ADVANCE_COLUMNS),
    "divisors": lambda s: lambda make: torch.full((s.batch, 2), 2.0, device=make.device),
    "ends": lambda s: [min(s.beams + 1, s.vocabulary) - 1] * s.batch,
    "advance_searches.state": lambda _: _search_state,
    "advance_searches.out": _search_results,
}


def _no_error(_: Sizes) -> float:
    return 0.0


def _scale(s: Sizes) -> float:
    return float(s.head_dim**-0.5)


_HEADS: dict[str, Any] = {"num_heads": lambda s: s.heads, "num_kv_heads": lambda s: s.kv_heads}
_LAYER_NORM_EPS, _RMS_NORM_EPS = {"eps": 1e-12}, {"eps": 1e-6}
# Sequences of one token, and the kind of norm; another one than "rms" is only compiled.
_FEW_ROWS = {"new": lambda s: [1] * s.batch, "norm": "rms", "codes": ""}
# Half of each sequence is new: a decode step if all have one token.
_HALF_NEW = {"kv_heads": 4, "new": lambda s: [-(-n // 2) for n in s.lengths]}

TABLE: dict[str, Row] = {
    "embed_layer_norm": Row(
        options=_LAYER_NORM_EPS,
        # the small tables stay in the cache
        moved=lambda s: 2 * s.tokens * s.hidden * s.itemsize + 3 * s.tokens * 4,
    ),
    "embed": Row(
        optional="position_ids position_table",
        moved=lambda s: 2 * s.tokens * s.hidden * s.itemsize + s.tokens * 4,
    ),
    "activate": Row("{tokens}x{features}", options={"kind": "gelu"}, optional="bias"),
    "linear_activate": Row(
        "{tokens}x{hidden}x{features} {kind}",
        options={"kind": "gelu_tanh"},
        optional="bias",
        sizes={"hidden": 16},
        flops=lambda s: 2 * s.tokens * s.hidden * s.features,
    ),
    "activate_gate": Row("{tokens}x{features}", options={"kind": "silu"}),
    # without codes it is a product of cuBLAS
    "linear": Row(
        "{tokens}x{hidden}x{features} {codes}",
        sizes={"codes": "int8"},
        flops=lambda s: 2 * s.tokens * s.hidden * s.features,
    ),
    "linear_groups": Row(
        "{tokens}x{hidden}x{features} of {groups}",
        sizes={"hidden": 48, "features": 80, "groups": 8},
        flops=lambda s: 2 * s.tokens * s.hidden * s.features,
    ),
    "add_layer_norm": Row(options=_LAYER_NORM_EPS),
    "layer_norm": Row(options=_LAYER_NORM_EPS),
    "residual_layer_norm": Row(options=_LAYER_NORM_EPS, read=results.stacked),
    "rms_norm": Row(options=_RMS_NORM_EPS),
    "residual_rms_norm": Row(options=_RMS_NORM_EPS, read=results.stacked),
    "norm_heads": Row(
        "{tokens} {heads}+{kv_heads}x{head_dim}",
        options=_HEADS | _RMS_NORM_EPS,
        sizes={"kv_heads": 4},
        # weights stay in the cache
        moved=lambda s: 2 * s.tokens * s.width * s.itemsize,
    ),
    "rotary": Row(
        "{tokens} {heads}+{kv_heads}x{head_dim}",
        options=_HEADS,
        sizes={"kv_heads": 4},
        moved=lambda s: 2 * s.tokens * s.width * s.itemsize,
    ),
    "masked_softmax": Row(
        "{batch}x{heads}x{queries}x{keys}{kind}",
        # without padding, a plain softmax can be a peer
        options={"scale": lambda s: 0.125 if s.kind else 1.0},
        sizes={
            "keys": lambda s: s.longest,
            "queries": lambda s: s.keys,
            "kind": lambda s: " padded" if min(s.lengths) < s.keys else "",
            "tokens": 0,
        },
        out=lambda s: lambda make: make.unwritten(s.batch, s.heads, s.queries, s.keys),
        # masked keys are not read, but written as zeros
        moved=lambda s: (sum(s.lengths) + s.batch * s.keys) * s.heads * s.queries * s.itemsize,
    ),
    "append_kv": Row(
        "{tokens} into {block_size} {heads}/{kv_heads}x{head_dim}{kind}",
        options=_HEADS | _RMS_NORM_EPS,
        optional="position_ids cos_sin query_weight key_weight",
        sizes={
            "kv_heads": 4,
            "kind": lambda s: (
                " normed" * ("query_weight" in s.optional) + " rotated" * ("cos_sin" in s.optional)
            ),
        },
        read=results.appended,
        written=("key_cache", "value_cache"),
        moved=_append_bytes,
        threshold=lambda s: None if "cos_sin" in s.optional else 0.0,
    ),
    "norm_append_kv": Row(
        "{tokens}x{hidden} into {block_size} {heads}/{kv_heads}x{head_dim}",
        options=_HEADS | _RMS_NORM_EPS,
        optional="position_ids cos_sin",
        sizes=_FEW_ROWS | {"kv_heads": 4},
        read=results.appended,
        written=("key_cache", "value_cache"),
    ),
    "linear_residual": Row("{tokens}x{features}x{hidden}", sizes=_FEW_ROWS),
    "norm_linear": Row(
        "{tokens}x{hidden}x{features}",
        options=_RMS_NORM_EPS | {"kind": "silu", "is_gated": True},
        sizes=_FEW_ROWS,
    ),
    "norm_next_tokens": Row(
        "{tokens}x{hidden}x{vocabulary}",
        options=_RMS_NORM_EPS,
        sizes=_FEW_ROWS,
        read=results.first,
    ),
    "copy_blocks": Row(
        "{batch} of {block_size} {layers}x{kv_heads}x{head_dim}",
        sizes={"kv_heads": 4, "layers": 2},
        read=results.first,
        written=("memory",),
        moved=lambda s: (
            2 * s.batch * 2 * s.layers * s.kv_heads * s.block_size * s.head_dim * s.itemsize
        ),
        threshold=_no_error,
    ),
    "attention_paged": Row(
        "{tokens} on {context} {all_heads}x{head_dim}",
        options=_HEADS | {"scale": _scale},
        optional="tiles",
        sizes=_HALF_NEW,
        tiles="paged_tiles",
        moved=lambda s: (
            2 * (_read_keys(s) * s.kv_heads + s.tokens * s.heads) * s.head_dim * s.itemsize
        ),
        flops=lambda s: 4 * s.heads * s.head_dim * _pairs(s),
    ),
    "paged_tiles": Row(
        "{tokens} on {context} {all_heads}x{head_dim}",
        options=_HEADS,
        sizes=_HALF_NEW,
        read=results.first_paged_tiles,
        moved=lambda s: 16 * s.batch + 20 * (s.tokens // 64 + 2 * s.batch),
        threshold=_no_error,
    ),
    "attention_tiles": Row(
        "{tokens} packed {heads}x{head_dim}",
        options=_HEADS,
        read=results.first_tiles,
        moved=lambda s: 4 * s.batch + 12 * (s.tokens // 64 + s.batch),
        threshold=_no_error,
    ),
    "attention_varlen": Row(
        "{tokens} packed {all_heads}x{head_dim}",
        options=_HEADS | {"scale": _scale},
        tiles="attention_tiles",
        moved=lambda s: (s.width + s.heads * s.head_dim) * s.tokens * s.itemsize,
        flops=lambda s: 4 * s.heads * s.head_dim * sum(n * n for n in s.lengths),
    ),
    "attention_padded": Row(
        "{batch}x{longest} {all_heads}x{head_dim}",
        options=_HEADS | {"scale": _scale},
        out=lambda s: (
            lambda make: (
                make.unwritten(s.batch * s.longest, s.heads * s.head_dim),
                make.unwritten(s.batch * s.longest**2, s.heads),
                make.unwritten(s.batch * s.longest, s.width),
            )
        ),
        read=results.first,
        # queries, keys and values are moved apart; scores are written, read by the softmax, written and read again
        moved=lambda s: (
            (3 * s.width + 2 * s.heads * s.head_dim + 4 * s.heads * s.longest)
            * (s.batch * s.longest * s.itemsize)
        ),
        flops=lambda s: 4 * s.heads * s.head_dim * s.batch * s.longest**2,
    ),
    "pool": Row(
        "{tokens}x{hidden} {mode}",
        options={"mode": "mean"},
        optional="normalize",
        # terms of a long sum nearly cancel
        threshold=lambda _: 1e-4,
    ),
    "term_weights": Row(
        "{tokens}x{hidden}x{terms} {mode}",
        options={"mode": "max"},
        sizes={"terms": 3000},
        read=results.first,
        moved=lambda s: (s.tokens + s.terms) * s.hidden * s.itemsize + 4 * s.batch * s.terms,
        flops=lambda s: 2 * s.tokens * s.hidden * s.terms,
    ),
    "first_tokens": Row(
        "{batch} of {tokens}x{hidden}",
        moved=lambda s: 2 * s.batch * s.hidden * s.itemsize,
        threshold=_no_error,
    ),
    "beam_step": Row(
        "{batch}x{beams}x{vocabulary}",
        options={"width": lambda s: s.best},
        optional="finished edits",
        # candidates of each sequence; None for twice the beams
        sizes={"best": None, "tokens": 0},
        out=lambda s: (
            lambda make: poison(BeamCandidates.empty(s.batch, s.best or 2 * s.beams, make.device))
        ),
        formula=results.best_scores,
        read=results.scores_of_candidates,
        threshold=lambda _: 1e-5,
    ),
    "follow_beams": Row(
        "{batch}x{beams} of {blocks}",
        options={"block_size": lambda s: s.block_size},
        sizes={"blocks": lambda s: -(-s.longest // s.block_size)},
        read=results.flat,
        written=("token_ids", "block_ids", "slots", "copies"),
        threshold=_no_error,
    ),
    "advance_searches": Row(
        "{batch}x{beams}x{vocabulary}",
        read=results.advanced,
        written=("out",),
        threshold=_no_error,
    ),
    # its kernel gives the bits of the reference
    "edit_logits": Row(
        "{batch}x{longest} of {vocabulary}",
        sizes={"vocabulary": 500},
        read=results.allowed_logits,
        written=("logits",),
        threshold=_no_error,
    ),
    "sample_tokens": Row(
        "{batch}x{vocabulary}",
        sizes={"vocabulary": 500, "temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.0},
        out=lambda s: _unwritten(torch.int32, s.batch),
        formula=lambda inputs: inputs["uniform"],
        read=results.uniform_of_tokens,
        threshold=lambda _: 1e-5,
    ),
}

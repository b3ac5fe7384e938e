"""The measured calls by name for `--only`; the most important calls first."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from varlen.execution.cuda.buckets import Buckets
from varlen_bench.kernels.grid import Grid, packed_lengths
from varlen_bench.ops import chosen_tokens, kv_blocks, padded, rows, sequences
from varlen_bench.ops.call import OpCall

# Width of a feed-forward block over the hidden size.
_FEATURES_FACTOR = 4


def softmax(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return softmax over the scores of the paper, and of a padded server batch."""
    lengths, make = grid.serving_lengths(), padded.masked_softmax
    largest, *others = [make([n] * batch, n, grid.heads, dtype) for batch, n in grid.paper()]
    all_heads = dict.fromkeys(heads for _, heads in grid.serving_widths)
    return [largest, *(make(lengths, max(lengths), heads, dtype) for heads in all_heads), *others]


def layer_norm(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return residual and layer norm for a server's batch and for the paper."""
    return _served_and_paper(grid, partial(rows.add_layer_norm, dtype=dtype))


def attention(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return attention for a server's batch, exact and as served, and for the paper."""
    make, lengths = sequences.attention_varlen, grid.serving_lengths()
    heads, head_dim = grid.heads, grid.hidden // grid.heads
    calls = [make(lengths, count, width // count, dtype) for width, count in grid.serving_widths]
    calls += _served_attention(grid, dtype)
    for batch, n in grid.paper():
        call = make([n] * batch, heads, head_dim, dtype)
        calls.append(replace(call, shape=f"{batch}x{n} {heads}x{head_dim}"))
    return calls


def activation(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return bias and GELU, and SwiGLU for a server's batch."""
    calls = _served_and_paper(grid, partial(rows.activate, dtype=dtype), _FEATURES_FACTOR)
    features = [_FEATURES_FACTOR * width for width, _ in grid.serving_widths]
    gates = [rows.activate_gate(grid.serving_tokens, count, dtype) for count in features]
    # the paper last, in case the time runs out
    return [*calls[: len(gates)], *gates, *calls[len(gates) :]]


def rms_norm(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return residual and RMS norm for a server's batch."""
    return [
        rows.residual_rms_norm(grid.serving_tokens, width, dtype)
        for width, _ in grid.serving_widths
    ]


def embedding(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return embeddings and layer norm for a server's batch and for the paper."""
    tables = {"vocabulary": grid.vocabulary, "positions": grid.positions}
    return _served_and_paper(grid, partial(rows.embed_layer_norm, dtype=dtype, **tables))


def packing(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return pool, unpack and pack for a server's batch."""
    lengths = grid.serving_lengths()
    makers = (sequences.pool, padded.unpack, padded.pack)
    return [make(lengths, width, dtype) for width, _ in grid.serving_widths for make in makers]


def beams(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return the beam step."""
    return [
        chosen_tokens.beam_step(count, grid.beams, vocabulary, dtype)
        for vocabulary in grid.vocabularies
        for count in grid.sequences
    ]


def paged(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return paged attention of decode steps and chunks, and the append of a batch."""
    # new tokens and contexts of each sequence, and a text
    steps: list[tuple[list[int], list[int], str]] = []
    for count, new, longest in grid.paged:
        # the shortest context is half of the longest
        contexts = [longest - i * longest // (2 * count) for i in range(count)]
        steps.append(([new] * count, contexts, f"{count}x{new} of {longest}"))
    # a chunk of a prompt, and single tokens of long contexts beside it
    count, new, _ = grid.paged[-1]
    decoding, longest = 2 * count, max(each[2] for each in grid.paged)
    contexts = [new] + [longest] * decoding
    steps.append(([new] + [1] * decoding, contexts, f"{new} and {decoding}x1 of {longest}"))
    calls = [
        replace(
            kv_blocks.attention_paged(new_tokens, contexts, *heads, dtype),
            shape=f"{text} {heads[0]}/{heads[1]}x{heads[2]}",
        )
        for heads in grid.decoder_heads
        for new_tokens, contexts, text in steps
    ]
    appends = [
        kv_blocks.append_kv(grid.serving_tokens, *heads, dtype, rotated=rotated)
        for heads in grid.decoder_heads
        for rotated in (False, True)
    ]
    return calls + appends


def _served_attention(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return attention as a server calls it, with tiles and unused slots in `cu_seqlens`.

    The launch depends on the mean length, so there is a call for each bucket of it.
    """
    calls = []
    for shortest, longest in ((grid.shortest, grid.longest), (3, 30), (3, 20)):
        lengths = packed_lengths(grid.serving_tokens, shortest, longest)
        # without a limit of sequences, as with the policy token_budget
        buckets = Buckets(grid.serving_tokens, grid.serving_tokens)
        slots = buckets.smallest(grid.serving_tokens, len(lengths)).sequences
        for width, heads in grid.serving_widths:
            head_dim = width // heads
            shape = f"{grid.serving_tokens} of {shortest}-{longest} {heads}x{head_dim}"
            call = sequences.attention_varlen(
                lengths, heads, head_dim, dtype, has_tiles=True, slots=slots
            )
            calls.append(replace(call, shape=shape))
    return calls


def _served_and_paper(grid: Grid, make: Callable[..., OpCall], factor: int = 1) -> list[OpCall]:
    """Return calls of `make(tokens, factor * width)` for a server's batch, then for the paper."""
    calls = [make(grid.serving_tokens, factor * width) for width, _ in grid.serving_widths]
    width = factor * grid.hidden
    for batch, n in grid.paper():
        calls.append(replace(make(batch * n, width), shape=f"{batch}x{n}x{width}"))
    return calls


GROUPS: dict[str, Callable[[Grid, torch.dtype], list[OpCall]]] = {
    "softmax": softmax,
    "layernorm": layer_norm,
    "attention": attention,
    "paged": paged,
    "beam": beams,
    "activation": activation,
    "rmsnorm": rms_norm,
    "embedding": embedding,
    "packing": packing,
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def is_compiled(call: OpCall, grid: Grid) -> bool:
    """Return whether torch.compile is a peer; some ops compile few shapes, to save time."""
    if not grid.with_compile:
        return False
    if call.op == "attention_varlen":
        head_dim = grid.hidden // grid.heads
        return call.shape == f"{grid.serving_tokens} packed {grid.heads}x{head_dim}"
    if call.op in {"activate", "embed_layer_norm"}:
        return call.tokens == grid.serving_tokens
    return True

"""The measured calls by name for `--only`; the most important calls first."""

from collections.abc import Callable

import torch

from varlen.execution.buckets import Buckets
from varlen_bench.kernels.grid import Grid, packed_lengths
from varlen_bench.ops import beam, padded, rows, sequences
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
    shapes = _served_and_paper(grid)
    return [rows.add_layer_norm(tokens, w, dtype, shape=shape) for tokens, w, shape in shapes]


def attention(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return attention for a server's batch and for the paper."""
    make, lengths = sequences.attention_varlen, grid.serving_lengths()
    heads, head_dim = grid.heads, grid.hidden // grid.heads
    served = [make(lengths, count, width // count, dtype) for width, count in grid.serving_widths]
    return served + [
        make([length] * batch, heads, head_dim, dtype, shape=f"{batch}x{length} {heads}x{head_dim}")
        for batch, length in grid.paper()
    ]


def served_attention(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return attention as a server calls it, with unused slots in `cu_seqlens`.

    The launch depends on the mean length, so there is a call for each bucket of it.
    """
    calls = []
    for shortest, longest in ((grid.shortest, grid.longest), (3, 30), (3, 20)):
        lengths = packed_lengths(grid.serving_tokens, shortest, longest)
        slots = Buckets(grid.serving_tokens).smallest(grid.serving_tokens, len(lengths)).sequences
        for width, heads in grid.serving_widths:
            head_dim = width // heads
            shape = f"{grid.serving_tokens} of {shortest}-{longest} {heads}x{head_dim}"
            calls.append(
                sequences.attention_varlen(
                    lengths, heads, head_dim, dtype, shape=shape, slots=slots
                )
            )
    return calls


def activation(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return bias and GELU, and the gate of SwiGLU."""
    calls = []
    for tokens, features, shape in _served_and_paper(grid, _FEATURES_FACTOR):
        calls.append(rows.activate(tokens, features, dtype, shape=shape))
        if not shape:
            calls.append(rows.silu_gate(tokens, features, dtype))
    return calls


def rms_norm(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return residual and RMS norm for a server's batch."""
    return [rows.rms_norm(grid.serving_tokens, width, dtype) for width, _ in grid.serving_widths]


def embedding(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return embeddings and layer norm for a server's batch and for the paper."""
    tables = {"vocabulary": grid.vocabulary, "positions": grid.positions}
    return [
        rows.embed_layer_norm(tokens, width, dtype, **tables, shape=shape)
        for tokens, width, shape in _served_and_paper(grid)
    ]


def packing(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return pool, unpack and pack for a server's batch."""
    lengths = grid.serving_lengths()
    makers = (sequences.pool, padded.unpack, padded.pack)
    return [make(lengths, width, dtype) for width, _ in grid.serving_widths for make in makers]


def beams(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Return the beam step."""
    return [
        beam.beam_step(count, grid.beams, vocabulary, dtype)
        for vocabulary in grid.vocabularies
        for count in grid.sequences
    ]


def _served_and_paper(grid: Grid, factor: int = 1) -> list[tuple[int, int, str]]:
    """Return tokens, `factor` times the width, and for the paper a name of the shape."""
    served = [(grid.serving_tokens, factor * width, "") for width, _ in grid.serving_widths]
    width = factor * grid.hidden
    paper = [(batch * n, width, f"{batch}x{n}x{width}") for batch, n in grid.paper()]
    return served + paper


GROUPS: dict[str, Callable[[Grid, torch.dtype], list[OpCall]]] = {
    "softmax": softmax,
    "layernorm": layer_norm,
    "attention": attention,
    "beam": beams,
    "activation": activation,
    "rmsnorm": rms_norm,
    "embedding": embedding,
    "packing": packing,
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def is_compiled(call: OpCall, grid: Grid) -> bool:
    """Return whether torch.compile is a peer; some ops compile few shapes, to save time."""
    if call.op == "attention_varlen":
        head_dim = grid.hidden // grid.heads
        return call.shape == f"{grid.serving_tokens} packed {grid.heads}x{head_dim}"
    if call.op in {"activate", "embed_layer_norm"}:
        return call.tokens == grid.serving_tokens
    return True

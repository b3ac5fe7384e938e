"""The measured calls by name for `--only`.

Their shapes are TurboTransformers', a server's, and tiny ones for a CPU.
Source of the paper's shapes: Fang et al. 2021, arXiv:2010.05680, section 6: 12 heads, hidden 768, batches of 1 and 20.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from varlen.execution.cuda.graphs import Buckets
from varlen_bench.ops.call import OpCall
from varlen_bench.ops.table import op_call
from varlen_bench.peers.checkpoints import BERT_BASE, MINILM, EncoderShape

# Width of a feed-forward block over the hidden size.
_FEATURES_FACTOR = 4


@dataclass(frozen=True, slots=True)
class Grid:
    """The measured shapes; the defaults suit a GPU.

    Attributes:
        batches, lengths, heads, hidden: the paper; all sequences of a batch have one length.
        serving_tokens: packed tokens of a server's batch.
        shortest, longest: bounds of its sequence lengths, which are uniform.
        serving_widths: hidden size and heads.
        sequences, beams, vocabularies: the beam step.
        paged: paged attention: sequences, new tokens of each, and longest context.
        decoder_heads: its heads, key heads and head_dim.
        vocabulary, positions: rows of the embedding tables.
        encoders: measured on a server's batch.
        small_batches: number and length of the sequences, to measure the host's time.
        copy_bytes: size of the copy that gives the bandwidth of the device.
        with_compile: whether torch.compile is a peer.
    """

    batches: tuple[int, ...] = (1, 20)
    lengths: tuple[int, ...] = (10, 20, 40, 60, 80, 100, 200, 300, 400, 500)
    heads: int = 12
    hidden: int = 768
    serving_tokens: int = 8192
    shortest: int = 5
    longest: int = 500
    serving_widths: tuple[tuple[int, int], ...] = ((768, 12), (384, 12), (1024, 16))
    sequences: tuple[int, ...] = (8, 1, 32, 128)
    beams: int = 4
    vocabularies: tuple[int, ...] = (32_000, 250_000)
    paged: tuple[tuple[int, int, int], ...] = (
        (64, 1, 1024),
        (8, 1, 8192),
        (256, 1, 512),
        (4, 256, 1024),
    )
    decoder_heads: tuple[tuple[int, int, int], ...] = ((32, 8, 128), (12, 12, 64))
    vocabulary: int = 30_522
    positions: int = 512
    encoders: tuple[EncoderShape, ...] = (BERT_BASE, MINILM)
    small_batches: tuple[tuple[int, int], ...] = ((1, 20), (8, 20))
    copy_bytes: int = 1024**3
    with_compile: bool = True

    def paper(self) -> list[tuple[int, int]]:
        """Return (batch, length) of the paper, the largest first in case the time runs out."""
        shapes = [(batch, length) for batch in self.batches for length in self.lengths]
        return sorted(shapes, key=lambda shape: -shape[0] * shape[1])

    def serving_lengths(self) -> list[int]:
        """Return the sequence lengths of a server's batch."""
        return packed_lengths(self.serving_tokens, self.shortest, self.longest)


FULL = Grid()
# Half of the paper's lengths, and no peer that takes seconds to compile.
QUICK = replace(FULL, lengths=(10, 40, 100, 200, 500), with_compile=False)
# Small enough that the whole benchmark runs on a CPU in seconds.
TINY = Grid(
    batches=(1, 2),
    lengths=(3, 16),
    heads=2,
    hidden=32,
    serving_tokens=48,
    shortest=2,
    longest=20,
    serving_widths=((64, 2),),
    sequences=(2, 1),
    beams=2,
    vocabularies=(100,),
    paged=((2, 1, 40), (2, 5, 20)),
    decoder_heads=((4, 2, 16),),
    vocabulary=50,
    positions=32,
    encoders=(EncoderShape("tiny", hidden=32, layers=2, heads=2, features=64, vocabulary=50),),
    small_batches=((1, 5),),
    copy_bytes=4096,
)


def packed_lengths(tokens: int, shortest: int, longest: int) -> list[int]:
    """Return fixed random lengths that sum to `tokens`, uniform except for the last."""
    generator = random.Random(0)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, generator.randint(shortest, longest)))
    return lengths


# Functions return the calls of a group, the most important first in case the time runs out.


def _softmax(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Softmax over the scores of the paper, and of a padded server batch."""
    largest, *others = [
        op_call("masked_softmax", dtype, lengths=[n] * batch, heads=grid.heads)
        for batch, n in grid.paper()
    ]
    served = [
        op_call("masked_softmax", dtype, lengths=grid.serving_lengths(), heads=heads)
        for heads in dict.fromkeys(heads for _, heads in grid.serving_widths)
    ]
    return [largest, *served, *others]


def _attention(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Attention for a server's batch, exact and as served, and for the paper.

    A served batch has tiles, and unused slots in `cu_seqlens`. The launch depends on the mean length, so there is a
    call for each bucket of it.
    """
    tokens, heads = grid.serving_tokens, grid.heads
    widths: list[dict[str, Any]] = [
        {"heads": count, "head_dim": width // count} for width, count in grid.serving_widths
    ]
    exact, op = grid.serving_lengths(), "attention_varlen"
    calls = [op_call(op, dtype, lengths=exact, **width) for width in widths]
    for shortest, longest in ((grid.shortest, grid.longest), (3, 30), (3, 20)):
        lengths = packed_lengths(tokens, shortest, longest)
        # without a limit of sequences, as with the policy token_budget
        slots = Buckets(tokens, tokens).smallest(tokens, len(lengths)).sequences
        text = f"{tokens} of {shortest}-{longest} {{heads}}x{{head_dim}}"
        calls += [
            op_call(op, dtype, "tiles", shape=text, lengths=lengths, slots=slots, **width)
            for width in widths
        ]
    sizes: dict[str, Any] = {"heads": heads, "head_dim": grid.hidden // heads}
    for batch, n in grid.paper():
        text = f"{batch}x{n} {{heads}}x{{head_dim}}"
        calls.append(op_call(op, dtype, shape=text, lengths=[n] * batch, **sizes))
    return calls


def _paged(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Paged attention of decode steps and chunks, and the append of a batch."""
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
    decoders: list[dict[str, Any]] = [
        dict(zip(("heads", "kv_heads", "head_dim"), heads, strict=True))
        for heads in grid.decoder_heads
    ]
    return [
        op_call(
            "attention_paged",
            dtype,
            shape=f"{text} {{all_heads}}x{{head_dim}}",
            lengths=contexts,
            new=new_tokens,
            **heads,
        )
        for heads in decoders
        for new_tokens, contexts, text in steps
    ] + [
        op_call("append_kv", dtype, optional, tokens=grid.serving_tokens, **heads)
        for heads in decoders
        for optional in ("", "position_ids cos_sin")
    ]


def _activation(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Bias and GELU, and SwiGLU for a server's batch."""
    features = [_FEATURES_FACTOR * width for width, _ in grid.serving_widths]
    gates = [
        op_call("activate_gate", dtype, tokens=grid.serving_tokens, features=n) for n in features
    ]
    calls = _rows("activate", grid, dtype, "features", _FEATURES_FACTOR)
    return [*calls[: len(gates)], *gates, *calls[len(gates) :]]


def _pooling(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    """Pool a server's batch."""
    return [
        op_call("pool", dtype, lengths=grid.serving_lengths(), hidden=width)
        for width, _ in grid.serving_widths
    ]


def _beam(grid: Grid, dtype: torch.dtype) -> list[OpCall]:
    return [
        op_call("beam_step", dtype, "", batch=count, beams=grid.beams, vocabulary=vocabulary)
        for vocabulary in grid.vocabularies
        for count in grid.sequences
    ]


def _rows(
    op: str, grid: Grid, dtype: torch.dtype, size: str = "hidden", factor: int = 1
) -> list[OpCall]:
    """Return calls on rows of each width for a server's batch, then for the paper."""
    sizes: dict[str, Any] = {"vocabulary": grid.vocabulary, "positions": grid.positions}

    def make(tokens: int, width: int, text: str = "") -> OpCall:
        return op_call(op, dtype, shape=text, tokens=tokens, **{**sizes, size: factor * width})

    calls = [make(grid.serving_tokens, width) for width, _ in grid.serving_widths]
    width = grid.hidden
    return calls + [
        make(batch * n, width, f"{batch}x{n}x{factor * width}") for batch, n in grid.paper()
    ]


GROUPS: dict[str, Callable[[Grid, torch.dtype], list[OpCall]]] = {
    "softmax": _softmax,
    "layernorm": lambda grid, dtype: _rows("add_layer_norm", grid, dtype),
    "attention": _attention,
    "paged": _paged,
    "beam": _beam,
    "activation": _activation,
    # only for a server's batch
    "rmsnorm": lambda grid, dtype: _rows("residual_rms_norm", replace(grid, batches=()), dtype),
    "embedding": lambda grid, dtype: _rows("embed_layer_norm", grid, dtype),
    "pooling": _pooling,
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def calls_of(grid: Grid, groups: Iterable[str], dtypes: Iterable[str]) -> list[OpCall]:
    """Return the calls of these groups, dtype by dtype."""
    return [
        made for kind in dtypes for group in groups for made in GROUPS[group](grid, DTYPES[kind])
    ]


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

"""Forward passes recorded without weights: what plans, lifetimes and pictures need of an encoder is its shape."""

import torch

from varlen.models.bert import Bert, BertLayer
from varlen.models.heads import Heads, record_head
from varlen.models.layers import Linear, Norm
from varlen.program.program import Program
from varlen.program.recorder import Recorder
from varlen_tools.bench_kernels.grid import EncoderShape

_POSITIONS = 512


def record(shape: EncoderShape, dtype: torch.dtype = torch.float32) -> Program:
    """Return the program that embeds sequences with an encoder of this shape; it can be planned, not run."""
    ops, encoder = Recorder(), _bert(shape, dtype)
    hidden = encoder.record(ops)
    return ops.finish(record_head(ops, "embed", encoder.heads, hidden, "mean"))


def _bert(shape: EncoderShape, dtype: torch.dtype) -> Bert:
    def empty(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    def linear(fan_in: int, fan_out: int) -> Linear:
        return Linear(empty(fan_in, fan_out), empty(fan_out))

    hidden, inner = shape.hidden, shape.features
    norm = Norm(empty(hidden), empty(hidden))
    layer = BertLayer(
        qkv=linear(hidden, 3 * hidden),
        attention_output=linear(hidden, hidden),
        attention_norm=norm,
        up=linear(hidden, inner),
        down=linear(inner, hidden),
        output_norm=norm,
    )
    return Bert(
        token_table=empty(shape.vocabulary, hidden),
        position_table=empty(_POSITIONS, hidden),
        type_table=empty(2, hidden),
        embedding_norm=norm,
        layers=(layer,) * shape.layers,
        num_heads=shape.heads,
        activation="gelu",
        norm_eps=1e-12,
        heads=Heads(),
    )

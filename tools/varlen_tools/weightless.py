"""Forward passes recorded without weights: what plans, lifetimes and pictures need of an encoder is its shape."""

import torch

from varlen.models.encoder import EncoderInputs, encode
from varlen.models.families import Affine, EncoderWeights, LayerWeights
from varlen.models.heads import apply_head
from varlen.program.program import Program, Recorder
from varlen_tools.bench_kernels.grid import EncoderShape

_POSITIONS = 512


def record(shape: EncoderShape, dtype: torch.dtype = torch.float32) -> Program:
    """Return the program that embeds sequences with an encoder of this shape; it can be planned, not run."""
    ops, inputs, weights = Recorder(), EncoderInputs(), _weights(shape, dtype)
    hidden = encode(ops, weights, inputs)
    return ops.finish(apply_head(ops, "embed", weights, inputs, hidden, "mean"))


def _weights(shape: EncoderShape, dtype: torch.dtype) -> EncoderWeights:
    def empty(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    def affine(fan_in: int, fan_out: int) -> Affine:
        return Affine(empty(fan_in, fan_out), empty(fan_out))

    hidden, inner = shape.hidden, shape.features
    norm = Affine(empty(hidden), empty(hidden))
    layer = LayerWeights(
        qkv=affine(hidden, 3 * hidden),
        attention_output=affine(hidden, hidden),
        attention_norm=norm,
        up=affine(hidden, inner),
        down=affine(inner, hidden),
        output_norm=norm,
    )
    return EncoderWeights(
        token_table=empty(shape.vocabulary, hidden),
        position_table=empty(_POSITIONS, hidden),
        type_table=empty(2, hidden),
        embedding_norm=norm,
        layers=(layer,) * shape.layers,
        num_heads=shape.heads,
        activation="gelu",
        norm_eps=1e-12,
        pooler=None,
        classifier=None,
    )

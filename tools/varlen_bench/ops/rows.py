"""Calls of the ops that compute each token alone: norms, activations, embeddings."""

import torch
import torch.nn.functional as F  # noqa: N812  # as everyone writes it
from torch import Tensor

from varlen_bench.ops.call import Inputs, OpCall, Tensors
from varlen_kernels import Activation

LAYER_NORM_EPS = 1e-12
RMS_NORM_EPS = 1e-6


def add_layer_norm(
    tokens: int, hidden: int, dtype: torch.dtype, *, has_bias: bool = False
) -> OpCall:
    """Return the bias, residual and layer norm at the end of a sublayer."""
    vectors = ["weight", "bias"] + ["x_bias"] * has_bias

    def formula(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, x_bias: Tensor | None = None
    ) -> Tensor:
        total = x + residual if x_bias is None else x + x_bias + residual
        return F.layer_norm(total, (hidden,), weight, bias, LAYER_NORM_EPS)

    return OpCall(
        op="add_layer_norm",
        shape=f"{tokens}x{hidden}",
        dtype=dtype,
        inputs=lambda make: {
            "x": make.random(tokens, hidden),
            "residual": make.random(tokens, hidden),
            **{name: make.random(hidden) for name in vectors},
            "out": make.unwritten(tokens, hidden),
        },
        formula=formula,
        bytes_moved=(3 * tokens + len(vectors)) * hidden * dtype.itemsize,
        options={"eps": LAYER_NORM_EPS},
        tokens=tokens,
    )


def rms_norm(tokens: int, hidden: int, dtype: torch.dtype) -> OpCall:
    """Return the residual add and RMS norm of a decoder, which also stores the sum."""
    return OpCall(
        op="rms_norm",
        shape=f"{tokens}x{hidden}",
        dtype=dtype,
        inputs=lambda make: {
            "x": make.random(tokens, hidden),
            "residual": make.random(tokens, hidden),
            "weight": make.random(hidden),
            "sum_out": make.unwritten(tokens, hidden),
            "out": make.unwritten(tokens, hidden),
        },
        formula=lambda x, residual, weight: F.rms_norm(
            x + residual, (hidden,), weight, RMS_NORM_EPS
        ),
        bytes_moved=(4 * tokens + 1) * hidden * dtype.itemsize,
        options={"eps": RMS_NORM_EPS},
        tokens=tokens,
    )


def activate(
    tokens: int, features: int, dtype: torch.dtype, *, kind: Activation = "gelu"
) -> OpCall:
    """Return the bias and activation inside a feed-forward block."""

    def formula(x: Tensor, bias: Tensor) -> Tensor:
        if kind == "relu":
            return F.relu(x + bias)
        return F.gelu(x + bias, approximate="tanh" if kind == "gelu_tanh" else "none")

    return OpCall(
        op="activate",
        shape=f"{tokens}x{features}",
        dtype=dtype,
        inputs=lambda make: {
            "x": make.random(tokens, features),
            "bias": make.random(features),
            "out": make.unwritten(tokens, features),
        },
        formula=formula,
        bytes_moved=(2 * tokens + 1) * features * dtype.itemsize,
        options={"kind": kind},
        tokens=tokens,
    )


def silu_gate(tokens: int, features: int, dtype: torch.dtype) -> OpCall:
    """Return the gate of a SwiGLU block."""

    def formula(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=1)
        return F.silu(gate) * up

    return OpCall(
        op="silu_gate",
        shape=f"{tokens}x{features}",
        dtype=dtype,
        inputs=lambda make: {
            "x": make.random(tokens, 2 * features),
            "out": make.unwritten(tokens, features),
        },
        formula=formula,
        bytes_moved=3 * tokens * features * dtype.itemsize,
        tokens=tokens,
    )


def embed_layer_norm(
    tokens: int, hidden: int, dtype: torch.dtype, *, vocabulary: int, positions: int
) -> OpCall:
    """Return the sum of three embeddings and its layer norm.

    `bytes_moved` counts token embeddings only, because the small tables stay in the cache.
    """
    tables = {"token": vocabulary, "position": positions, "type": 2}

    def inputs(make: Tensors) -> Inputs:
        return {
            **{f"{name}_ids": make.ids(rows, tokens) for name, rows in tables.items()},
            **{f"{name}_table": make.random(rows, hidden) for name, rows in tables.items()},
            "weight": make.random(hidden),
            "bias": make.random(hidden),
            "out": make.unwritten(tokens, hidden),
        }

    def formula(
        token_ids: Tensor,
        position_ids: Tensor,
        type_ids: Tensor,
        token_table: Tensor,
        position_table: Tensor,
        type_table: Tensor,
        weight: Tensor,
        bias: Tensor,
    ) -> Tensor:
        summed = F.embedding(token_ids, token_table) + F.embedding(position_ids, position_table)
        summed = summed + F.embedding(type_ids, type_table)
        return F.layer_norm(summed, (hidden,), weight, bias, LAYER_NORM_EPS)

    return OpCall(
        op="embed_layer_norm",
        shape=f"{tokens}x{hidden}",
        dtype=dtype,
        inputs=inputs,
        formula=formula,
        bytes_moved=2 * tokens * hidden * dtype.itemsize + 3 * tokens * 4,
        options={"eps": LAYER_NORM_EPS},
        tokens=tokens,
    )

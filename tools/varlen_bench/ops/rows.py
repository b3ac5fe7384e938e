"""Calls of the ops that work on rows alone: norms, activations, embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  # as everyone writes it
from torch import Tensor

from varlen_bench.ops.call import Inputs, OpCall, Tensors
from varlen_kernels import Activation

LAYER_NORM_EPS = 1e-12
RMS_NORM_EPS = 1e-6


def add_layer_norm(
    tokens: int, hidden: int, dtype: torch.dtype, *, x_bias: bool = False, shape: str = ""
) -> OpCall:
    """Return the residual add and layer norm at the end of a sublayer."""
    vectors = ("weight", "bias", "x_bias") if x_bias else ("weight", "bias")

    def inputs(make: Tensors) -> Inputs:
        return {
            "x": make.random(tokens, hidden),
            "residual": make.random(tokens, hidden),
            **{name: make.random(hidden) for name in vectors},
            "out": make.unwritten(tokens, hidden),
        }

    def exact(inputs: Inputs) -> Tensor:
        total = inputs["x"].double() + inputs["residual"].double()
        if x_bias:
            total += inputs["x_bias"].double()
        weight, bias = inputs["weight"].double(), inputs["bias"].double()
        return F.layer_norm(total, (hidden,), weight, bias, LAYER_NORM_EPS)

    return OpCall(
        op="add_layer_norm",
        shape=shape or f"{tokens}x{hidden}",
        dtype=dtype,
        inputs=inputs,
        exact=exact,
        bytes_moved=(3 * tokens + len(vectors)) * hidden * dtype.itemsize,
        options={"eps": LAYER_NORM_EPS},
        tokens=tokens,
    )


def rms_norm(tokens: int, hidden: int, dtype: torch.dtype) -> OpCall:
    """Return the residual add and RMS norm at the start of a decoder's sublayer; the sum is kept."""

    def inputs(make: Tensors) -> Inputs:
        return {
            "x": make.random(tokens, hidden),
            "residual": make.random(tokens, hidden),
            "weight": make.random(hidden),
            "sum_out": make.unwritten(tokens, hidden),
            "out": make.unwritten(tokens, hidden),
        }

    def exact(inputs: Inputs) -> Tensor:
        total = inputs["x"].double() + inputs["residual"].double()
        return F.rms_norm(total, (hidden,), inputs["weight"].double(), RMS_NORM_EPS)

    return OpCall(
        op="rms_norm",
        shape=f"{tokens}x{hidden}",
        dtype=dtype,
        inputs=inputs,
        exact=exact,
        bytes_moved=(4 * tokens + 1) * hidden * dtype.itemsize,
        options={"eps": RMS_NORM_EPS},
        tokens=tokens,
    )


def activate(
    tokens: int,
    features: int,
    dtype: torch.dtype,
    *,
    kind: Activation = "gelu",
    shape: str = "",
) -> OpCall:
    """Return bias and activation, between the two layers of a feed-forward block."""

    def exact(inputs: Inputs) -> Tensor:
        total: Tensor = inputs["x"].double() + inputs["bias"].double()
        if kind == "relu":
            return total.relu()
        return F.gelu(total, approximate="tanh" if kind == "gelu_tanh" else "none")

    return OpCall(
        op="activate",
        shape=shape or f"{tokens}x{features}",
        dtype=dtype,
        inputs=lambda make: {
            "x": make.random(tokens, features),
            "bias": make.random(features),
            "out": make.unwritten(tokens, features),
        },
        exact=exact,
        bytes_moved=(2 * tokens + 1) * features * dtype.itemsize,
        options={"kind": kind},
        tokens=tokens,
    )


def silu_gate(tokens: int, features: int, dtype: torch.dtype) -> OpCall:
    """Return the gate of a SwiGLU block."""

    def exact(inputs: Inputs) -> Tensor:
        gate, up = inputs["x"].double().chunk(2, dim=1)
        gated: Tensor = F.silu(gate) * up
        return gated

    return OpCall(
        op="silu_gate",
        shape=f"{tokens}x{features}",
        dtype=dtype,
        inputs=lambda make: {
            "x": make.random(tokens, 2 * features),
            "out": make.unwritten(tokens, features),
        },
        exact=exact,
        bytes_moved=3 * tokens * features * dtype.itemsize,
        tokens=tokens,
    )


def embed_layer_norm(
    tokens: int,
    hidden: int,
    dtype: torch.dtype,
    *,
    vocabulary: int,
    positions: int,
    shape: str = "",
) -> OpCall:
    """Return the sum of three embeddings and its layer norm; positions and types count as cached."""
    tables = {"token": vocabulary, "position": positions, "type": 2}

    def inputs(make: Tensors) -> Inputs:
        return {
            **{f"{name}_ids": make.ids(rows, tokens) for name, rows in tables.items()},
            **{f"{name}_table": make.random(rows, hidden) for name, rows in tables.items()},
            "weight": make.random(hidden),
            "bias": make.random(hidden),
            "out": make.unwritten(tokens, hidden),
        }

    def exact(inputs: Inputs) -> Tensor:
        summed = sum(inputs[f"{name}_table"].double()[inputs[f"{name}_ids"]] for name in tables)
        weight, bias = inputs["weight"].double(), inputs["bias"].double()
        return F.layer_norm(summed, (hidden,), weight, bias, LAYER_NORM_EPS)

    return OpCall(
        op="embed_layer_norm",
        shape=shape or f"{tokens}x{hidden}",
        dtype=dtype,
        inputs=inputs,
        exact=exact,
        bytes_moved=2 * tokens * hidden * dtype.itemsize + 3 * tokens * 4,
        options={"eps": LAYER_NORM_EPS},
        tokens=tokens,
    )

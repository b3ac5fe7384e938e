"""Calls of the ops that compute each token by itself: norms, activations, embeddings, heads."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from varlen_bench.ops.call import Made, OpCall, Tensors, ids, shaped, stacked
from varlen_kernels import Activation

LAYER_NORM_EPS = 1e-12
RMS_NORM_EPS = 1e-6
_POSITIONS = 512


def _norm(
    op: str,
    rows: str,
    weights: str,
    eps: float,
    tokens: int,
    hidden: int,
    dtype: torch.dtype,
) -> OpCall:
    """Return a norm of a sum of rows; a "residual" one returns the sum, too.

    Args:
        rows, weights: names of the inputs of these shapes.
    """
    size = (tokens, hidden)
    call = _rows(op, size, dtype, shaped(size, rows) | shaped((hidden,), weights), eps=eps)

    def both(make: Tensors) -> tuple[Tensor, Tensor]:
        return make.unwritten(*size), make.unwritten(*size)

    return replace(call, out=both, read=stacked) if op.startswith("residual") else call


# Each is called with tokens, hidden size and dtype.
add_layer_norm = partial(_norm, "add_layer_norm", "x residual", "weight bias", LAYER_NORM_EPS)
layer_norm = partial(_norm, "layer_norm", "x", "weight bias", LAYER_NORM_EPS)
residual_layer_norm = partial(
    _norm, "residual_layer_norm", "x residual", "weight bias", LAYER_NORM_EPS
)
rms_norm = partial(_norm, "rms_norm", "x", "weight", RMS_NORM_EPS)
residual_rms_norm = partial(_norm, "residual_rms_norm", "x residual", "weight", RMS_NORM_EPS)


def activate(
    tokens: int,
    features: int,
    dtype: torch.dtype,
    *,
    kind: Activation = "gelu",
    biased: bool = True,
) -> OpCall:
    """Return the bias and activation inside a feed-forward block."""
    inputs = shaped((tokens, features), "x") | shaped((features,), "bias" if biased else "")
    return _rows("activate", (tokens, features), dtype, inputs, kind=kind)


def linear_activate(
    tokens: int, hidden: int, features: int, dtype: torch.dtype, *, kind: Activation = "gelu_tanh"
) -> OpCall:
    """Return the first linear layer of a feed-forward block and its activation."""
    inputs = {"x": (tokens, hidden), "weight": (hidden, features), "bias": (features,)}
    call = _rows("linear_activate", (tokens, features), dtype, inputs, kind=kind)
    shape, flops = f"{tokens}x{hidden}x{features} {kind}", 2 * tokens * hidden * features
    return replace(call, shape=shape, flops=flops)


def activate_gate(tokens: int, features: int, dtype: torch.dtype) -> OpCall:
    """Return the gate of a SwiGLU block."""
    inputs = shaped((tokens, 2 * features), "x")
    return _rows("activate_gate", (tokens, features), dtype, inputs, kind="silu")


def embed_layer_norm(
    tokens: int, hidden: int, dtype: torch.dtype, *, vocabulary: int, positions: int
) -> OpCall:
    """Return the sum of three embeddings and its layer norm."""
    tables = {"token": vocabulary, "position": positions, "type": 2}
    inputs: dict[str, Made] = {f"{name}_ids": ids(rows, tokens) for name, rows in tables.items()}
    inputs |= {f"{name}_table": (rows, hidden) for name, rows in tables.items()}
    inputs |= shaped((hidden,), "weight bias")
    call = _rows("embed_layer_norm", (tokens, hidden), dtype, inputs, eps=LAYER_NORM_EPS)
    # the small tables stay in the cache
    return replace(call, moved=2 * tokens * hidden * dtype.itemsize + 3 * tokens * 4)


def embed(
    tokens: int, hidden: int, dtype: torch.dtype, *, vocabulary: int, positions: int = 0
) -> OpCall:
    """Return the embedding of tokens, and of their positions unless `positions` is 0."""
    inputs: dict[str, Made] = {"token_ids": ids(vocabulary, tokens)}
    inputs["token_table"] = (vocabulary, hidden)
    if positions:
        inputs |= {"position_ids": ids(positions, tokens), "position_table": (positions, hidden)}
    call = _rows("embed", (tokens, hidden), dtype, inputs)
    return replace(call, moved=2 * tokens * hidden * dtype.itemsize + tokens * 4)


def norm_heads(
    tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> OpCall:
    """Return the RMS norm of each query and key head."""
    weights = shaped((head_dim,), "query_weight key_weight")
    return _heads(
        "norm_heads", tokens, num_heads, num_kv_heads, head_dim, dtype, weights, eps=RMS_NORM_EPS
    )


def rotary(
    tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> OpCall:
    """Return the rotation of each query and key head by its position."""
    inputs = positions_of(tokens, head_dim)
    return _heads("rotary", tokens, num_heads, num_kv_heads, head_dim, dtype, inputs)


def positions_of(tokens: int, head_dim: int) -> dict[str, Made]:
    """Return random positions, and the cosines and sines of random angles for each position."""

    def cos_sin(make: Tensors) -> Tensor:
        angles = make.random(_POSITIONS, head_dim // 2, dtype=torch.float32)
        return torch.cat((angles.cos(), angles.sin()), dim=1)

    return {"position_ids": ids(_POSITIONS, tokens), "cos_sin": cos_sin}


def _heads(
    op: str,
    tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    inputs: Mapping[str, Made],
    **options: Any,
) -> OpCall:
    """Return an op on the query and key heads of each token."""
    size = (tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    options |= {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    call = _rows(op, size, dtype, {"qkv": size, **inputs}, **options)
    shape = f"{tokens} {num_heads}+{num_kv_heads}x{head_dim}"
    # weights and positions stay in the cache
    return replace(call, shape=shape, moved=2 * tokens * size[1] * dtype.itemsize)


def _rows(
    op: str, size: tuple[int, int], dtype: torch.dtype, inputs: Mapping[str, Made], **options: Any
) -> OpCall:
    """Return an op whose result has this size, tokens first."""
    tokens, width = size
    return OpCall(op, f"{tokens}x{width}", dtype, inputs, size, options, tokens=tokens)

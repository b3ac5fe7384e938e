"""Calls of the ops that compute each token alone: norms, activations, embeddings, heads."""

import torch
import torch.nn.functional as F  # noqa: N812  # as everyone writes it
from torch import Tensor

from varlen_bench.ops.call import Inputs, OpCall, Tensors, stacked
from varlen_kernels import Activation

LAYER_NORM_EPS = 1e-12
RMS_NORM_EPS = 1e-6


def add_layer_norm(tokens: int, hidden: int, dtype: torch.dtype) -> OpCall:
    """Return the residual and layer norm at the end of a sublayer."""

    def formula(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x + residual, (hidden,), weight, bias, LAYER_NORM_EPS)

    return OpCall(
        op="add_layer_norm",
        shape=f"{tokens}x{hidden}",
        dtype=dtype,
        inputs=lambda make: {
            "x": make.random(tokens, hidden),
            "residual": make.random(tokens, hidden),
            "weight": make.random(hidden),
            "bias": make.random(hidden),
            "out": make.unwritten(tokens, hidden),
        },
        formula=formula,
        bytes_moved=(3 * tokens + 2) * hidden * dtype.itemsize,
        options={"eps": LAYER_NORM_EPS},
        tokens=tokens,
    )


def layer_norm(tokens: int, hidden: int, dtype: torch.dtype) -> OpCall:
    """Return the layer norm before a sublayer."""
    return OpCall(
        op="layer_norm",
        shape=f"{tokens}x{hidden}",
        dtype=dtype,
        inputs=lambda make: {
            "x": make.random(tokens, hidden),
            "weight": make.random(hidden),
            "bias": make.random(hidden),
            "out": make.unwritten(tokens, hidden),
        },
        formula=lambda x, weight, bias: F.layer_norm(x, (hidden,), weight, bias, LAYER_NORM_EPS),
        bytes_moved=(2 * tokens + 2) * hidden * dtype.itemsize,
        options={"eps": LAYER_NORM_EPS},
        tokens=tokens,
    )


def residual_layer_norm(tokens: int, hidden: int, dtype: torch.dtype) -> OpCall:
    """Return the residual and layer norm between two sublayers of a pre-norm decoder."""

    def formula(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        total = x + residual
        return torch.stack((total, F.layer_norm(total, (hidden,), weight, bias, LAYER_NORM_EPS)))

    return OpCall(
        op="residual_layer_norm",
        shape=f"{tokens}x{hidden}",
        dtype=dtype,
        inputs=lambda make: {
            "x": make.random(tokens, hidden),
            "residual": make.random(tokens, hidden),
            "weight": make.random(hidden),
            "bias": make.random(hidden),
            "out": (make.unwritten(tokens, hidden), make.unwritten(tokens, hidden)),
        },
        formula=formula,
        bytes_moved=(4 * tokens + 2) * hidden * dtype.itemsize,
        options={"eps": LAYER_NORM_EPS},
        read=stacked,
        tokens=tokens,
    )


def rms_norm(tokens: int, hidden: int, dtype: torch.dtype) -> OpCall:
    """Return the RMS norm before a sublayer."""
    return OpCall(
        op="rms_norm",
        shape=f"{tokens}x{hidden}",
        dtype=dtype,
        inputs=lambda make: {
            "x": make.random(tokens, hidden),
            "weight": make.random(hidden),
            "out": make.unwritten(tokens, hidden),
        },
        formula=lambda x, weight: F.rms_norm(x, (hidden,), weight, RMS_NORM_EPS),
        bytes_moved=(2 * tokens + 1) * hidden * dtype.itemsize,
        options={"eps": RMS_NORM_EPS},
        tokens=tokens,
    )


def residual_rms_norm(tokens: int, hidden: int, dtype: torch.dtype) -> OpCall:
    """Return the residual and RMS norm between two sublayers of a decoder."""

    def formula(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        total = x + residual
        return torch.stack((total, F.rms_norm(total, (hidden,), weight, RMS_NORM_EPS)))

    return OpCall(
        op="residual_rms_norm",
        shape=f"{tokens}x{hidden}",
        dtype=dtype,
        inputs=lambda make: {
            "x": make.random(tokens, hidden),
            "residual": make.random(tokens, hidden),
            "weight": make.random(hidden),
            "out": (make.unwritten(tokens, hidden), make.unwritten(tokens, hidden)),
        },
        formula=formula,
        bytes_moved=(4 * tokens + 1) * hidden * dtype.itemsize,
        options={"eps": RMS_NORM_EPS},
        read=stacked,
        tokens=tokens,
    )


def activate(
    tokens: int, features: int, dtype: torch.dtype, *, kind: Activation = "gelu"
) -> OpCall:
    """Return the bias and activation inside a feed-forward block."""

    def formula(x: Tensor, bias: Tensor) -> Tensor:
        if kind == "relu":
            return F.relu(x + bias)
        if kind == "silu":
            return F.silu(x + bias)
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


def linear_activate(
    tokens: int, hidden: int, features: int, dtype: torch.dtype, *, kind: Activation = "gelu_tanh"
) -> OpCall:
    """Return the first linear layer of a feed-forward block and its activation."""

    def formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        product = x @ weight + bias
        if kind == "relu":
            return F.relu(product)
        if kind == "silu":
            return F.silu(product)
        return F.gelu(product, approximate="tanh" if kind == "gelu_tanh" else "none")

    return OpCall(
        op="linear_activate",
        shape=f"{tokens}x{hidden}x{features} {kind}",
        dtype=dtype,
        inputs=lambda make: {
            "x": make.random(tokens, hidden),
            "weight": make.random(hidden, features),
            "bias": make.random(features),
            "out": make.unwritten(tokens, features),
        },
        formula=formula,
        bytes_moved=(tokens * (hidden + features) + (hidden + 1) * features) * dtype.itemsize,
        options={"kind": kind},
        flops=2 * tokens * hidden * features,
        tokens=tokens,
    )


def activate_gate(tokens: int, features: int, dtype: torch.dtype) -> OpCall:
    """Return the gate of a SwiGLU block."""

    def formula(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=1)
        return F.silu(gate) * up

    return OpCall(
        op="activate_gate",
        shape=f"{tokens}x{features}",
        dtype=dtype,
        options={"kind": "silu"},
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


def embed(
    tokens: int, hidden: int, dtype: torch.dtype, *, vocabulary: int, positions: int = 0
) -> OpCall:
    """Return the embedding of tokens, and of their positions unless `positions` is 0."""

    def inputs(make: Tensors) -> Inputs:
        has_positions = positions > 0
        return {
            "token_ids": make.ids(vocabulary, tokens),
            "token_table": make.random(vocabulary, hidden),
            "position_ids": make.ids(positions, tokens) if has_positions else None,
            "position_table": make.random(positions, hidden) if has_positions else None,
            "out": make.unwritten(tokens, hidden),
        }

    def formula(
        token_ids: Tensor,
        token_table: Tensor,
        position_ids: Tensor | None,
        position_table: Tensor | None,
    ) -> Tensor:
        embedded = F.embedding(token_ids, token_table)
        if position_ids is None or position_table is None:
            return embedded
        return embedded + F.embedding(position_ids, position_table)

    return OpCall(
        op="embed",
        shape=f"{tokens}x{hidden}",
        dtype=dtype,
        inputs=inputs,
        formula=formula,
        bytes_moved=2 * tokens * hidden * dtype.itemsize + tokens * 4,
        tokens=tokens,
    )


def norm_heads(
    tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> OpCall:
    """Return the RMS norm of each query and key head."""
    heads = [num_heads, num_kv_heads, num_kv_heads]

    def inputs(make: Tensors) -> Inputs:
        qkv = make.random(tokens, sum(heads) * head_dim)
        weights = make.random(head_dim), make.random(head_dim)
        out = make.unwritten(*qkv.shape)
        return {"qkv": qkv, "query_weight": weights[0], "key_weight": weights[1], "out": out}

    def formula(qkv: Tensor, query_weight: Tensor, key_weight: Tensor) -> Tensor:
        queries, keys, values = torch.split(qkv.view(tokens, -1, head_dim), heads, dim=1)
        queries = F.rms_norm(queries, (head_dim,), query_weight, RMS_NORM_EPS)
        keys = F.rms_norm(keys, (head_dim,), key_weight, RMS_NORM_EPS)
        return torch.cat((queries, keys, values), dim=1).flatten(1)

    return OpCall(
        op="norm_heads",
        shape=f"{tokens} {num_heads}+{num_kv_heads}x{head_dim}",
        dtype=dtype,
        inputs=inputs,
        formula=formula,
        bytes_moved=2 * tokens * (num_heads + 2 * num_kv_heads) * head_dim * dtype.itemsize,
        options={"num_heads": num_heads, "num_kv_heads": num_kv_heads, "eps": RMS_NORM_EPS},
        tokens=tokens,
    )


def rotary(
    tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> OpCall:
    """Return the rotation of each query and key head by its position."""
    half, positions = head_dim // 2, 512

    def inputs(make: Tensors) -> Inputs:
        qkv = make.random(tokens, (num_heads + 2 * num_kv_heads) * head_dim)
        angles = make.random(positions, half, dtype=torch.float32)
        return {
            "qkv": qkv,
            "position_ids": make.ids(positions, tokens),
            "cos_sin": torch.cat((angles.cos(), angles.sin()), dim=1),
            "out": make.unwritten(*qkv.shape),
        }

    def formula(qkv: Tensor, position_ids: Tensor, cos_sin: Tensor) -> Tensor:
        heads = qkv.view(tokens, -1, head_dim)
        rotated = heads[:, : num_heads + num_kv_heads]
        cos, sin = torch.split(cos_sin[position_ids.long()][:, None], half, dim=2)
        first, second = torch.split(rotated, half, dim=2)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)
        return torch.cat((rotated, heads[:, num_heads + num_kv_heads :]), dim=1).flatten(1)

    return OpCall(
        op="rotary",
        shape=f"{tokens} {num_heads}+{num_kv_heads}x{head_dim}",
        dtype=dtype,
        inputs=inputs,
        formula=formula,
        bytes_moved=2 * tokens * (num_heads + 2 * num_kv_heads) * head_dim * dtype.itemsize,
        options={"num_heads": num_heads, "num_kv_heads": num_kv_heads},
        tokens=tokens,
    )

"""Cases of the ops that work on rows alone: softmax, norms, activations, embeddings."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F  # noqa: N812  # as everyone writes it
from torch import Tensor

from varlen_bench.kernels.case import Case, Inputs, generator_for, random_tensor, unwritten
from varlen_bench.kernels.peers import compiled_peer, liger_peer, torch_peer

EPS = 1e-12
_GATE_EPS = 1e-6


def softmax_case(lengths: list[int], width: int, heads: int, dtype: torch.dtype) -> Case:
    """Return the softmax of attention over padded scores, `[batch, heads, width, width]`.

    Where no sequence is shorter than `width` the scale is 1, so that a plain softmax is a peer too.
    """
    batch, full = len(lengths), min(lengths) == width
    scale = 1.0 if full else 0.125

    def make(device: torch.device, seed: int) -> Inputs:
        shape, numbers = (batch, heads, width, width), generator_for(device, seed)
        seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
        hidden = torch.arange(width, device=device) >= seqlens[:, None]
        mask = torch.zeros(batch, width, dtype=dtype, device=device)
        mask.masked_fill_(hidden, torch.finfo(dtype).min)
        return {
            "x": random_tensor(shape, dtype, device, numbers),
            "seqlens": seqlens,
            "mask": mask[:, None, None, :],
            "out": unwritten(shape, dtype, device),
        }

    def call(kernels: ModuleType, inputs: Inputs) -> object:
        return kernels.masked_softmax(
            inputs["x"], inputs["seqlens"], scale=scale, out=inputs["out"]
        )

    def exact(inputs: Inputs) -> Tensor:
        readable = torch.arange(width, device=inputs["x"].device) < inputs["seqlens"][:, None]
        scores = inputs["x"].double() * scale
        return scores.masked_fill_(~readable[:, None, None, :], -torch.inf).softmax(-1)

    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(x * scale + mask, dim=-1)

    def plain(x: Tensor) -> Tensor:
        return torch.softmax(x, dim=-1)

    peers = [torch_peer(masked, "x", "mask", name="torch-masked")]
    if full:
        peers += [
            torch_peer(plain, "x"),
            liger_peer("liger_softmax", lambda function, inputs: function(inputs["x"])),
            compiled_peer(plain, "x"),
        ]
    else:
        peers.append(compiled_peer(masked, "x", "mask"))
    read = sum(lengths) * heads * width
    written = batch * heads * width * width
    return Case(
        op="masked_softmax",
        shape=f"{batch}x{heads}x{width}x{width}" + ("" if full else " padded"),
        dtype=dtype,
        make=make,
        call=call,
        exact=exact,
        bytes_moved=(read + written) * dtype.itemsize,
        peers=tuple(peers),
    )


def add_layer_norm_case(tokens: int, hidden: int, dtype: torch.dtype, *, shape: str = "") -> Case:
    """Return the residual add and layer norm at the end of a sublayer."""

    def make(device: torch.device, seed: int) -> Inputs:
        numbers = generator_for(device, seed)
        return {
            "x": random_tensor((tokens, hidden), dtype, device, numbers),
            "residual": random_tensor((tokens, hidden), dtype, device, numbers),
            "weight": random_tensor((hidden,), dtype, device, numbers),
            "bias": random_tensor((hidden,), dtype, device, numbers),
            "out": unwritten((tokens, hidden), dtype, device),
        }

    def call(kernels: ModuleType, inputs: Inputs) -> object:
        x, residual, weight, bias, out = inputs.values()
        return kernels.add_layer_norm(x, residual, weight, bias, eps=EPS, out=out)

    def exact(inputs: Inputs) -> Tensor:
        total = inputs["x"].double() + inputs["residual"].double()
        weight, bias = inputs["weight"].double(), inputs["bias"].double()
        return F.layer_norm(total, (hidden,), weight, bias, EPS)

    def plain(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x + residual, (hidden,), weight, bias, EPS)

    names = ("x", "residual", "weight", "bias")
    return Case(
        op="add_layer_norm",
        shape=shape or f"{tokens}x{hidden}",
        dtype=dtype,
        make=make,
        call=call,
        exact=exact,
        bytes_moved=(3 * tokens + 2) * hidden * dtype.itemsize,
        peers=(
            torch_peer(plain, *names),
            liger_peer(
                "liger_layer_norm",
                lambda function, i: function(i["x"] + i["residual"], i["weight"], i["bias"], EPS),
            ),
            compiled_peer(plain, *names),
        ),
        tokens=tokens,
    )


def rms_norm_case(tokens: int, hidden: int, dtype: torch.dtype) -> Case:
    """Return the residual add and RMS norm that a decoder's sublayer begins with, the sum kept."""

    def make(device: torch.device, seed: int) -> Inputs:
        numbers = generator_for(device, seed)
        return {
            "x": random_tensor((tokens, hidden), dtype, device, numbers),
            "residual": random_tensor((tokens, hidden), dtype, device, numbers),
            "weight": random_tensor((hidden,), dtype, device, numbers),
            "sum_out": unwritten((tokens, hidden), dtype, device),
            "out": unwritten((tokens, hidden), dtype, device),
        }

    def call(kernels: ModuleType, inputs: Inputs) -> object:
        x, residual, weight, sum_out, out = inputs.values()
        return kernels.rms_norm(
            x, weight, eps=_GATE_EPS, residual=residual, sum_out=sum_out, out=out
        )

    def exact(inputs: Inputs) -> Tensor:
        total = inputs["x"].double() + inputs["residual"].double()
        return F.rms_norm(total, (hidden,), inputs["weight"].double(), _GATE_EPS)

    def plain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, (hidden,), weight, _GATE_EPS), total

    def read(result: object, inputs: Inputs) -> Tensor:  # noqa: ARG001  # a `read`
        assert isinstance(result, tuple)
        return result[0]  # type: ignore[no-any-return]

    names = ("x", "residual", "weight")
    return Case(
        op="rms_norm",
        shape=f"{tokens}x{hidden}",
        dtype=dtype,
        make=make,
        call=call,
        exact=exact,
        bytes_moved=(4 * tokens + 1) * hidden * dtype.itemsize,
        peers=(
            torch_peer(plain, *names, read=read),
            liger_peer(
                "liger_fused_add_rms_norm",
                lambda function, i: function(i["x"], i["residual"], i["weight"], _GATE_EPS),
                read=read,
            ),
            compiled_peer(plain, *names, read=read),
        ),
        tokens=tokens,
    )


def activate_case(tokens: int, features: int, dtype: torch.dtype, *, shape: str = "") -> Case:
    """Return bias and exact GELU, between the two layers of a feed-forward block."""

    def make(device: torch.device, seed: int) -> Inputs:
        numbers = generator_for(device, seed)
        return {
            "x": random_tensor((tokens, features), dtype, device, numbers),
            "bias": random_tensor((features,), dtype, device, numbers),
            "out": unwritten((tokens, features), dtype, device),
        }

    def call(kernels: ModuleType, inputs: Inputs) -> object:
        return kernels.activate(inputs["x"], inputs["bias"], kind="gelu", out=inputs["out"])

    def plain(x: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(x + bias)

    return Case(
        op="activate",
        shape=shape or f"{tokens}x{features}",
        dtype=dtype,
        make=make,
        call=call,
        exact=lambda inputs: F.gelu(inputs["x"].double() + inputs["bias"].double()),
        bytes_moved=(2 * tokens + 1) * features * dtype.itemsize,
        peers=(torch_peer(plain, "x", "bias"), compiled_peer(plain, "x", "bias")),
        tokens=tokens,
    )


def silu_gate_case(tokens: int, features: int, dtype: torch.dtype) -> Case:
    """Return the gate of a SwiGLU block; liger-kernel gets its two halves apart, as it wants them."""

    def make(device: torch.device, seed: int) -> Inputs:
        numbers = generator_for(device, seed)
        x = random_tensor((tokens, 2 * features), dtype, device, numbers)
        gate, up = (half.contiguous() for half in x.chunk(2, dim=1))
        out = unwritten((tokens, features), dtype, device)
        return {"x": x, "gate": gate, "up": up, "out": out}

    def plain(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=1)
        return F.silu(gate) * up

    return Case(
        op="silu_gate",
        shape=f"{tokens}x{features}",
        dtype=dtype,
        make=make,
        call=lambda kernels, inputs: kernels.silu_gate(inputs["x"], out=inputs["out"]),
        exact=lambda inputs: F.silu(inputs["gate"].double()) * inputs["up"].double(),
        bytes_moved=3 * tokens * features * dtype.itemsize,
        peers=(
            torch_peer(plain, "x"),
            liger_peer("liger_swiglu", lambda function, i: function(i["gate"], i["up"])),
            compiled_peer(plain, "x"),
        ),
        tokens=tokens,
    )


def embed_case(
    tokens: int,
    hidden: int,
    vocabulary: int,
    positions: int,
    dtype: torch.dtype,
    *,
    shape: str = "",
) -> Case:
    """Return the sum of three embeddings and its layer norm; positions and types count as cached."""

    def make(device: torch.device, seed: int) -> Inputs:
        numbers = generator_for(device, seed)

        def ids(rows: int) -> Tensor:
            size = (tokens,)
            return torch.randint(rows, size, dtype=torch.int32, device=device, generator=numbers)

        return {
            "token_ids": ids(vocabulary),
            "position_ids": ids(positions),
            "type_ids": ids(2),
            "token_table": random_tensor((vocabulary, hidden), dtype, device, numbers),
            "position_table": random_tensor((positions, hidden), dtype, device, numbers),
            "type_table": random_tensor((2, hidden), dtype, device, numbers),
            "weight": random_tensor((hidden,), dtype, device, numbers),
            "bias": random_tensor((hidden,), dtype, device, numbers),
            "out": unwritten((tokens, hidden), dtype, device),
        }

    ids_and_tables = ("token_ids", "position_ids", "type_ids", "token_table", "position_table")
    names = (*ids_and_tables, "type_table", "weight", "bias")

    def call(kernels: ModuleType, inputs: Inputs) -> object:
        operands = (inputs[name] for name in names)
        return kernels.embed_layer_norm(*operands, eps=EPS, out=inputs["out"])

    def plain(*operands: Tensor) -> Tensor:
        *pairs, weight, bias = operands
        summed = F.embedding(pairs[0], pairs[3])
        for ids, table in zip(pairs[1:3], pairs[4:], strict=True):
            summed = summed + F.embedding(ids, table)
        return F.layer_norm(summed, (hidden,), weight, bias, EPS)

    def exact(inputs: Inputs) -> Tensor:
        return plain(
            *(t.double() if t.is_floating_point() else t for t in (inputs[n] for n in names))
        )

    return Case(
        op="embed_layer_norm",
        shape=shape or f"{tokens}x{hidden}",
        dtype=dtype,
        make=make,
        call=call,
        exact=exact,
        bytes_moved=2 * tokens * hidden * dtype.itemsize + 3 * tokens * 4,
        peers=(torch_peer(plain, *names), compiled_peer(plain, *names)),
        tokens=tokens,
    )

"""Cases of the ops that know where a sequence begins: attention, pooling, and the way to padding and back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import ModuleType

import torch
import torch.nn.functional as F  # noqa: N812  # as everyone writes it
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from varlen_bench.kernels.case import (
    Case,
    Inputs,
    Peer,
    generator_for,
    random_tensor,
    unwritten,
)
from varlen_bench.kernels.peers import compiled_peer, torch_peer, varlen_attention_peer
from varlen_kernels import reference


def attention_case(
    lengths: list[int],
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    shape: str,
    compiled: bool = False,
    room: int = 0,
) -> Case:
    """Return attention over packed tokens; peers that pad get their tensors padded ahead, unmeasured.

    Args:
        lengths: of the sequences.
        heads: of the attention.
        head_dim: of each head.
        dtype: of all tensors.
        shape: what the case is called.
        compiled: whether torch.compile is a peer.
        room: sequences that `cu_seqlens` has room for, as in a server's batch; those past the last are empty.
    """
    longest, tokens, hidden = max(lengths), sum(lengths), heads * head_dim

    def make(device: torch.device, seed: int) -> Inputs:
        numbers = generator_for(device, seed)
        qkv = random_tensor((tokens, 3 * hidden), dtype, device, numbers)
        bounds = _bounds(lengths, device)
        padded = reference.unpack(qkv, bounds, max_seqlen=longest)
        q, k, v = padded.view(len(lengths), longest, 3, heads, head_dim).permute(2, 0, 3, 1, 4)
        inside = torch.arange(longest, device=device) < bounds.diff()[:, None]
        return {
            "qkv": qkv,
            "cu_seqlens": F.pad(bounds, (0, max(room - len(lengths), 0)), value=tokens),
            "q": q.contiguous(),
            "k": k.contiguous(),
            "v": v.contiguous(),
            "inside": inside[:, None, None, :],
            "out": unwritten((tokens, hidden), dtype, device),
        }

    def call(kernels: ModuleType, inputs: Inputs) -> object:
        return kernels.attention_varlen(
            inputs["qkv"],
            inputs["cu_seqlens"],
            num_heads=heads,
            scale=head_dim**-0.5,
            out=inputs["out"],
        )

    padding = _padded_attention_peers(full=min(lengths) == longest, compiled=compiled)
    return Case(
        op="attention_varlen",
        shape=shape,
        dtype=dtype,
        make=make,
        call=call,
        exact=lambda inputs: _exact_attention(inputs["qkv"].double(), lengths, heads),
        bytes_moved=4 * tokens * hidden * dtype.itemsize,
        peers=(varlen_attention_peer(heads, longest), *padding),
        flops=4 * hidden * sum(length * length for length in lengths),
        tokens=tokens,
    )


def _exact_attention(qkv: Tensor, lengths: list[int], heads: int) -> Tensor:
    """Return attention inside each sequence in the dtype of `qkv`, one sequence at a time."""
    tokens, width = qkv.shape
    q, k, v = qkv.view(tokens, 3, heads, -1).permute(1, 2, 0, 3)
    out = torch.empty_like(q)
    for begin, end in pairwise(_bounds(lengths, torch.device("cpu")).tolist()):
        here = slice(begin, end)
        scores = q[:, here] @ k[:, here].transpose(1, 2) * q.shape[-1] ** -0.5
        out[:, here] = scores.softmax(-1) @ v[:, here]
    return out.transpose(0, 1).reshape(tokens, width // 3)


def _padded_attention_peers(*, full: bool, compiled: bool) -> list[Peer]:
    """Return the peers that take `[batch, heads, longest, head_dim]`; where all is `full` they need no mask."""

    def unfused(q: Tensor, k: Tensor, v: Tensor, inside: Tensor) -> Tensor:
        scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
        if not full:
            scores = scores.masked_fill(~inside, torch.finfo(q.dtype).min)
        return torch.matmul(scores.softmax(-1), v)

    def sdpa(q: Tensor, k: Tensor, v: Tensor, inside: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=None if full else inside)

    def cudnn(q: Tensor, k: Tensor, v: Tensor, inside: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return sdpa(q, k, v, inside)

    def read(result: object, inputs: Inputs) -> Tensor:
        assert isinstance(result, Tensor)
        return result.transpose(1, 2)[inputs["inside"][:, 0, 0]].flatten(1)

    names = ("q", "k", "v", "inside")
    peers = [
        torch_peer(sdpa, *names, name="sdpa", read=read),
        torch_peer(cudnn, *names, name="sdpa-cudnn", read=read),
        torch_peer(unfused, *names, read=read),
    ]
    if compiled:
        peers.append(compiled_peer(unfused, *names, read=read))
    return peers


def pool_case(lengths: list[int], hidden: int, dtype: torch.dtype) -> Case:
    """Return mean pooling with normalisation; peers pool packed tokens as well."""
    tokens, batch = sum(lengths), len(lengths)

    def make(device: torch.device, seed: int) -> Inputs:
        numbers = generator_for(device, seed)
        bounds = _bounds(lengths, device)
        owner = torch.repeat_interleave(torch.arange(batch, device=device), bounds.diff().long())
        return {
            "x": random_tensor((tokens, hidden), dtype, device, numbers),
            "cu_seqlens": bounds,
            "normalize": torch.ones(batch, dtype=torch.bool, device=device),
            "owner": owner,
            "out": unwritten((batch, hidden), torch.float32, device),
        }

    def call(kernels: ModuleType, inputs: Inputs) -> object:
        return kernels.pool(
            inputs["x"],
            inputs["cu_seqlens"],
            inputs["normalize"],
            mode="mean",
            out=inputs["out"],
        )

    def exact(inputs: Inputs) -> Tensor:
        sums = torch.zeros(batch, hidden, dtype=torch.float64, device=inputs["x"].device)
        sums.index_add_(0, inputs["owner"], inputs["x"].double())
        return F.normalize(sums / inputs["cu_seqlens"].diff()[:, None], dim=1)

    def added(x: Tensor, owner: Tensor, cu_seqlens: Tensor) -> Tensor:
        sums = torch.zeros(batch, hidden, dtype=torch.float32, device=x.device)
        sums = sums.index_add(0, owner, x.float())
        return F.normalize(sums / cu_seqlens.diff()[:, None], dim=1)

    return Case(
        op="pool",
        shape=f"{tokens}x{hidden} mean",
        dtype=dtype,
        make=make,
        call=call,
        exact=exact,
        bytes_moved=tokens * hidden * dtype.itemsize + 4 * batch * hidden,
        peers=(
            torch_peer(added, "x", "owner", "cu_seqlens"),
            compiled_peer(added, "x", "owner", "cu_seqlens"),
        ),
        # sums of many terms that nearly cancel
        threshold=1e-4,
        tokens=tokens,
    )


def unpack_case(lengths: list[int], hidden: int, dtype: torch.dtype) -> Case:
    """Return the way from packed tokens to padded ones."""
    tokens, batch, longest = sum(lengths), len(lengths), max(lengths)

    def call(kernels: ModuleType, inputs: Inputs) -> object:
        return kernels.unpack(
            inputs["x"], inputs["cu_seqlens"], max_seqlen=longest, out=inputs["padded"]
        )

    def copied(x: Tensor, place: Tensor) -> Tensor:
        padded = x.new_zeros(batch * longest, hidden)
        return padded.index_copy_(0, place, x).view(batch, longest, hidden)

    return Case(
        op="unpack",
        shape=f"{tokens}x{hidden} to {batch}x{longest}",
        dtype=dtype,
        make=_padding_inputs(lengths, hidden, dtype),
        call=call,
        exact=lambda inputs: copied(inputs["x"].double(), inputs["place"]),
        bytes_moved=(tokens + batch * longest) * hidden * dtype.itemsize,
        peers=(torch_peer(copied, "x", "place"),),
        threshold=0.0,
        tokens=tokens,
    )


def pack_case(lengths: list[int], hidden: int, dtype: torch.dtype) -> Case:
    """Return the way from padded tokens to packed ones."""
    tokens, batch, longest = sum(lengths), len(lengths), max(lengths)

    def call(kernels: ModuleType, inputs: Inputs) -> object:
        return kernels.pack(
            inputs["full"], inputs["cu_seqlens"], tokens=tokens, out=inputs["packed"]
        )

    def selected(full: Tensor, place: Tensor) -> Tensor:
        return full.view(batch * longest, hidden).index_select(0, place)

    return Case(
        op="pack",
        shape=f"{batch}x{longest} to {tokens}x{hidden}",
        dtype=dtype,
        make=_padding_inputs(lengths, hidden, dtype),
        call=call,
        exact=lambda inputs: selected(inputs["full"].double(), inputs["place"]),
        bytes_moved=2 * tokens * hidden * dtype.itemsize,
        peers=(torch_peer(selected, "full", "place"),),
        threshold=0.0,
        tokens=tokens,
    )


def _padding_inputs(
    lengths: list[int], hidden: int, dtype: torch.dtype
) -> Callable[[torch.device, int], Inputs]:
    tokens, batch, longest = sum(lengths), len(lengths), max(lengths)

    def make(device: torch.device, seed: int) -> Inputs:
        numbers = generator_for(device, seed)
        bounds = _bounds(lengths, device)
        inside = torch.arange(longest, device=device) < bounds.diff()[:, None]
        return {
            "x": random_tensor((tokens, hidden), dtype, device, numbers),
            "full": random_tensor((batch, longest, hidden), dtype, device, numbers),
            "cu_seqlens": bounds,
            "place": inside.flatten().nonzero().squeeze(1),
            "padded": unwritten((batch, longest, hidden), dtype, device),
            "packed": unwritten((tokens, hidden), dtype, device),
        }

    return make


def _bounds(lengths: list[int], device: torch.device) -> Tensor:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return bounds.to(device=device, dtype=torch.int32)

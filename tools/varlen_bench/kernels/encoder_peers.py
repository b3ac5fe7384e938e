"""Peers of the encoder: BERT in PyTorch, packed, and transformers' on padded sub-batches.

Packed BERT is the strongest peer of our encoder: no padding, one product for queries, keys and values, and
torch.compile to fuse what lies between the products. `torch.nn.attention.varlen.varlen_attn` is FlashAttention-2.
"""

from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812  # as everyone writes it
from torch import Tensor, nn

from varlen.request.request import Prompt
from varlen_bench.kernels.peers import Call, Compile, Function, Peer, Peers, attribute
from varlen_bench.ops.call import as_tensor
from varlen_bench.peers.checkpoints import Attention, load_encoder
from varlen_bench.peers.engines import pad

Order = Literal["arrival", "sorted"]

# Order of the sequences and number of sub-batches. More sub-batches pad less and use the GPU less.
_SPLITS: list[tuple[Order, int]] = [("sorted", 4), ("sorted", 8), ("arrival", 1), ("arrival", 4)]
_ATTENTIONS: tuple[Attention, ...] = ("sdpa", "eager")
# torch.compile runs once per sub-batch, because the shapes differ.
COMPILE_SECONDS = 180.0
_PACKED_COMPILE_SECONDS = 60.0


@torch.inference_mode()
def exact_vectors(folder: Path, prompts: list[Prompt], device: torch.device) -> Tensor:
    """Return the normalised mean-pooled vectors in float64, [sequences, hidden]."""
    model = load_encoder(folder, torch.float64, device, "eager")
    sub_batches = _split(prompts, "sorted", 8)
    forward = _padded_forward(model, prompts, sub_batches, device)
    return as_tensor(forward({}), {})[_output_rows(sub_batches, device)]


def encoder_peers(
    folder: Path,
    prompts: list[Prompt],
    dtype: torch.dtype,
    device: torch.device,
    compile_model: Compile,
) -> Peers:
    """Return packed torch, and transformers with both attentions and all splits.

    Packed torch and one split are compiled too.
    """

    @cache
    def model(attention: Attention) -> Any:
        return load_encoder(folder, dtype, device, attention)

    def peer(attention: Attention, order: Order, count: int, *, compiled: bool = False) -> Peer:
        sub_batches = _split(prompts, order, count)
        rows = _output_rows(sub_batches, device)

        def build(_: Compile) -> Call:
            loaded = model(attention)
            run = compile_model(loaded) if compiled else loaded
            return _padded_forward(run, prompts, sub_batches, device)

        kind = f"{attention}-compile" if compiled else attention
        return Peer(
            f"{kind}-{order}-{count}",
            build,
            lambda result, inputs: as_tensor(result, inputs)[rows],
            compile_seconds=COMPILE_SECONDS if compiled else 0.0,
        )

    def packed(*, compiled: bool) -> Peer:
        def build(_: Compile) -> Call:
            attention = attribute("torch.nn.attention.varlen", "varlen_attn")
            forward: Function = PackedBert(model("sdpa"), attention)
            arguments = packed_inputs(prompts, dtype, device)
            run = compile_model(forward) if compiled else forward
            return lambda inputs: run(*arguments)  # noqa: ARG005  # a Call

        name = "packed-compile" if compiled else "packed"
        return Peer(name, build, compile_seconds=_PACKED_COMPILE_SECONDS if compiled else 0.0)

    padded = [peer(attention, *split) for attention in _ATTENTIONS for split in _SPLITS]
    compiled = (packed(compiled=True), peer("sdpa", *_SPLITS[0], compiled=True))
    return Peers((packed(compiled=False), *padded, *compiled))


def _padded_forward(
    model: Function, prompts: list[Prompt], sub_batches: list[list[int]], device: torch.device
) -> Call:
    """Return a call that computes the vectors of all sub-batches."""
    batches = [pad([prompts[i].token_ids.tolist() for i in sub_batch]) for sub_batch in sub_batches]
    on_device = [[torch.from_numpy(array).to(device) for array in batch] for batch in batches]

    def pooled(ids: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = model(input_ids=ids, attention_mask=mask).last_hidden_state
        kept = mask[..., None].to(hidden.dtype)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        sums = (hidden * kept).sum(1, dtype=wide)
        return F.normalize(sums / mask.sum(1, keepdim=True), dim=1)

    return lambda inputs: torch.cat([pooled(*batch) for batch in on_device])  # noqa: ARG005  # a Call


def _split(prompts: list[Prompt], order: Order, count: int) -> list[list[int]]:
    """Return the sequence indices of at most `count` sub-batches of about equal size."""
    indices = list(range(len(prompts)))
    count = min(count, len(indices))
    if order == "sorted":
        indices.sort(key=lambda i: -prompts[i].num_tokens)
    bounds = [round(i * len(indices) / count) for i in range(count + 1)]
    return [indices[begin:end] for begin, end in pairwise(bounds)]


def _output_rows(sub_batches: list[list[int]], device: torch.device) -> Tensor:
    """Return the row of each sequence in the concatenated sub-batches."""
    flat = torch.tensor([i for sub_batch in sub_batches for i in sub_batch])
    return flat.argsort().to(device)


class PackedBert(nn.Module):
    """Mean-pooled, normalised vectors of packed sequences, with the weights of a BertModel."""

    def __init__(self, bert: Any, attention: Function) -> None:
        """Take the weights of `bert`; `attention` has the parameters of `varlen_attn`."""
        super().__init__()
        if bert.config.hidden_act != "gelu":
            raise ValueError(f"hidden_act is {bert.config.hidden_act!r}; allowed: 'gelu'")
        self._attention = attention
        self._heads: int = bert.config.num_attention_heads
        self._embeddings = bert.embeddings
        self._layers = bert.encoder.layer
        own = [layer.attention.self for layer in self._layers]
        self._qkv_weights = [
            torch.cat([part.query.weight, part.key.weight, part.value.weight]) for part in own
        ]
        self._qkv_biases = [
            torch.cat([part.query.bias, part.key.bias, part.value.bias]) for part in own
        ]

    def forward(
        self, ids: Tensor, positions: Tensor, cu_seqlens: Tensor, members: Tensor, longest: int
    ) -> Tensor:
        """Return fp32 vectors, [sequences, hidden].

        Args:
            ids, positions: [tokens].
            cu_seqlens: [sequences + 1] int32.
            members: [sequences, tokens] in the dtype of the weights, 1 where a token belongs to a sequence.
            longest: tokens of the longest sequence.
        """
        tables = self._embeddings
        x = tables.word_embeddings(ids) + tables.position_embeddings(positions)
        x = tables.LayerNorm(x + tables.token_type_embeddings.weight[0])
        for layer, weight, bias in zip(
            self._layers, self._qkv_weights, self._qkv_biases, strict=True
        ):
            q, k, v = F.linear(x, weight, bias).view(len(x), 3, self._heads, -1).unbind(1)
            context = self._attention(q, k, v, cu_seqlens, cu_seqlens, longest, longest)
            # some versions of torch also return the log-sum-exp
            context = context[0] if isinstance(context, tuple) else context
            out = layer.attention.output
            x = out.LayerNorm(out.dense(context.flatten(1)) + x)
            features = F.gelu(layer.intermediate.dense(x))
            x = layer.output.LayerNorm(layer.output.dense(features) + x)
        # a sum has the direction of its mean, and a product adds in fp32
        return F.normalize((members @ x).float(), dim=1)


def packed_inputs(
    prompts: list[Prompt], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Return the arguments of `PackedBert.forward` for these prompts."""
    lengths = [prompt.num_tokens for prompt in prompts]
    ids = torch.cat([torch.from_numpy(prompt.token_ids) for prompt in prompts])
    positions = torch.cat([torch.arange(length) for length in lengths])
    cu_seqlens = torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    members = F.one_hot(rows, len(lengths)).T.to(dtype).contiguous()
    tensors = (ids, positions, cu_seqlens, members)
    return (*(tensor.to(device) for tensor in tensors), max(lengths))  # type: ignore[return-value]

"""BERT over packed tokens in PyTorch, with torch's attention for sequences of any lengths.

The strongest peer of our encoder: no padding, one product for queries, keys and values, and torch.compile to fuse what
lies between the products. `torch.nn.attention.varlen.varlen_attn` is FlashAttention-2.
"""

from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as everyone writes it
from torch import Tensor, nn

from varlen.request.request import Prompt
from varlen_bench.kernels.peers import Function


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

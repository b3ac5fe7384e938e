"""Calls of the sampling of one token for each row of logits."""

import torch
from torch import Tensor

from varlen_bench.ops.call import Inputs, OpCall


def sample_tokens(
    rows: int,
    vocabulary: int,
    dtype: torch.dtype = torch.float32,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> OpCall:
    """Return the sampling of one token a row.

    A result is right if each uniform number is inside its token's part of the sum of probabilities.

    Args:
        dtype: of the model; logits are fp32.
        temperature, top_k, top_p, min_p: of every row.
    """
    settings = {"temperature": temperature, "top_p": top_p, "min_p": min_p}

    def sums(logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of probabilities up to and before each token."""
        order = logits.double().sort(dim=1, descending=True, stable=True).indices
        probability = (logits.double() / max(temperature, 1e-9)).softmax(1).gather(1, order)
        rank = torch.arange(vocabulary, device=logits.device)
        limit = 1 if temperature == 0 else top_k or vocabulary
        probability = probability.masked_fill(rank >= limit, 0.0)
        probability /= probability.sum(1, keepdim=True)
        before = probability.cumsum(1) - probability
        probability = probability.masked_fill((before >= top_p) & (rank > 0), 0.0)
        probability = probability.masked_fill(probability < min_p * probability[:, :1], 0.0)
        probability = torch.zeros_like(probability).scatter_(1, order, probability)
        probability /= probability.sum(1, keepdim=True)
        after = probability.cumsum(1)
        return after, after - probability

    def read(result: object, inputs: Inputs) -> Tensor:
        """Return each uniform number, moved into the part of the token that was drawn."""
        assert isinstance(result, Tensor)
        after, before = sums(inputs["logits"])
        # the poison of an unwritten token is no valid index
        token = result.long().clamp(0, vocabulary - 1)[:, None]
        uniform: Tensor = inputs["uniform"][:, None]
        return uniform.clamp(before.gather(1, token), after.gather(1, token)).squeeze(1)

    return OpCall(
        op="sample_tokens",
        shape=f"{rows}x{vocabulary}",
        dtype=dtype,
        inputs=lambda make: {
            "logits": make.random(rows, vocabulary, dtype=torch.float32).mul_(3),
            **{
                name: torch.full((rows,), value, device=make.device)
                for name, value in settings.items()
            },
            "top_k": make.ints([top_k] * rows),
            "uniform": torch.linspace(0.01, 0.99, rows, dtype=torch.float64, device=make.device),
            "out": make.unwritten(rows, dtype=torch.int32),
        },
        formula=lambda uniform, **_: uniform,
        bytes_moved=rows * vocabulary * 4,
        read=read,
        threshold=1e-5,
    )

"""What both models have in common: sizes, training settings and attention."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model; an encoder and its decoder have `layers` layers each."""

    vocabulary: int
    positions: int
    hidden: int
    layers: int
    heads: int


@dataclass(frozen=True, slots=True)
class Training:
    """How a model is trained.

    Attributes:
        samples: sequences, or dates, in each step.
        matrix_rate: first learning rate of the matrices of layers.
    """

    shape: Shape
    steps: int
    samples: int
    seed: int = 0
    matrix_rate: float = 0.02


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    heads: int,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Return attention in `heads` heads; all tensors are `[batch, tokens, hidden]`.

    `mask`, `[batch, 1, 1, tokens of keys]`, is true for real tokens.
    """
    # [batch, tokens, hidden] -> [batch, heads, tokens, head_dim]
    query, key, value = (
        each.view(*each.shape[:2], heads, -1).transpose(1, 2) for each in (query, key, value)
    )
    mixed = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_causal
    )
    return mixed.transpose(1, 2).flatten(2)

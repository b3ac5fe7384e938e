"""Feed-forward parts of a layer: two linear layers, or experts.

Source: Shazeer 2020, arXiv:2002.05202 (gates); Shazeer et al. 2017, arXiv:1701.06538 (experts).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.models.checkpoint.layers import GroupLinear, Linear
    from varlen.program.program import Value
    from varlen.program.recorder import Recorder
    from varlen_kernels import Activation


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Two linear layers with an activation between them.

    Attributes:
        up: the layer in front of the activation; gate and up side by side, if `is_gated`.
    """

    up: Linear
    down: Linear
    is_gated: bool = True

    def record(self, ops: Recorder, x: Value, activation: Activation) -> Value:
        """Record the result for each token, `[tokens, hidden]`."""
        if self.is_gated:
            inner = ops.activate_gate(self.up.record(ops, x), kind=activation)
        else:
            inner = self.up.record_activated(ops, x, activation)
        return self.down.record(ops, inner)


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts: each token sums the results of a few, by weight.

    Attributes:
        router: a logit of each expert, in fp32: a rounded one may choose another expert.
        up: the layer in front of the activation; gate and up side by side, if `is_gated`.
        count: experts of a token.
        normalizes: whether the weights of a token's experts add up to 1; else each is its part of the softmax over all.
    """

    router: Linear
    up: GroupLinear
    down: GroupLinear
    count: int
    normalizes: bool
    is_gated: bool
    bias: Tensor | None = None

    def record(self, ops: Recorder, x: Value, activation: Activation) -> Value:
        """Record the sum of its experts for each token, `[tokens, hidden]`."""
        import torch

        rows = x if x.dtype == torch.float32 else ops.to_fp32(x)
        logits = self.router.record(ops, rows)
        routes = ops.route_tokens(logits, count=self.count, normalize=self.normalizes)
        inner = self.up.record(ops, ops.select_rows(x, routes.tokens), routes.cu_groups)
        activate = ops.activate_gate if self.is_gated else ops.activate
        inner = activate(inner, kind=activation)
        given = self.down.record(ops, inner, routes.cu_groups)
        total = ops.sum_experts(given, routes.weights, routes.places, self.bias)
        return ops.all_reduce(total) if self.down.is_partial else total

"""The training loop: Muon for the matrices of layers, AdamW for all other weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from varlen_tools.train_demo.muon import Muon

_MATRIX_RATE, _OTHER_RATE = 0.02, 3e-3
_WARMUP_STEPS = 20
_LARGEST_GRADIENT = 1.0

# Gets the number of a step, from 1, and its loss.
Report = Callable[[int, float], None]


def fit(
    model: nn.Module,
    matrices: Iterable[Tensor],
    loss_of_step: Callable[[], Tensor],
    *,
    steps: int,
    report: Report,
) -> None:
    """Train a model in place; the learning rates fall to zero over the steps.

    Args:
        model: the parameters to train.
        matrices: those of them that Muon updates.
        loss_of_step: returns the loss of the next samples.
        steps: number of updates.
        report: is called after each of them.
    """
    chosen = list(matrices)
    ids = set(map(id, chosen))
    others = [weight for weight in model.parameters() if id(weight) not in ids]
    optimizers = (
        Muon(chosen, lr=_MATRIX_RATE),
        torch.optim.AdamW(others, lr=_OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    )
    rates = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / _WARMUP_STEPS, 1 - step / steps)
        )
        for optimizer in optimizers
    ]
    for step in range(steps):
        loss = loss_of_step()
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), _LARGEST_GRADIENT)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.step()
            rate.step()
        report(step + 1, loss.item())

"""The training loop: Muon for the matrices of layers, AdamW for all other weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from varlen_tools.train_demo.muon import Muon
from varlen_tools.train_demo.transformer import Shape, Training

_OTHER_RATE = 3e-3
_WARMUP_STEPS = 20
_LARGEST_GRADIENT = 1.0

# Gets the number of a step, from 1, and its loss.
Report = Callable[[int, float], None]

_M = TypeVar("_M", bound=nn.Module)


def fit(
    make_model: Callable[[Shape], _M],
    training: Training,
    loss_of_step: Callable[[_M], Tensor],
    report: Report,
) -> _M:
    """Return a trained model; the learning rates fall to zero over the steps.

    The same training gives the same weights, on one machine with one number of threads.

    Args:
        make_model: makes a model; the layers are in lists of modules.
        loss_of_step: returns the model's loss on the next samples.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(training.seed)
        model = make_model(training.shape)
    optimizers = _optimizers(model, training.matrix_rate)
    rates = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / _WARMUP_STEPS, 1 - step / training.steps)
        )
        for optimizer in optimizers
    ]
    for step in range(training.steps):
        loss = loss_of_step(model)
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), _LARGEST_GRADIENT)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.step()
            rate.step()
        report(step + 1, loss.item())
    return model


def _optimizers(model: nn.Module, matrix_rate: float) -> tuple[torch.optim.Optimizer, ...]:
    """Return Muon for the matrices of lists of layers, and AdamW for all other weights."""
    layers = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    matrices = [weight for each in layers for weight in each.parameters() if weight.ndim == 2]
    ids = set(map(id, matrices))
    others = [weight for weight in model.parameters() if id(weight) not in ids]
    return (
        Muon(matrices, lr=matrix_rate),
        torch.optim.AdamW(others, lr=_OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    )

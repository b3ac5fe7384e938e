"""The training loop: Muon for the matrices of layers, AdamW for all other weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from varlen_tools.train_demo.transformer import Shape, Training

_OTHER_RATE = 3e-3
_WARMUP_STEPS = 20
_LARGEST_GRADIENT = 1.0
# The quintic polynomial that the source fits, so that few rounds bring every singular value near 1.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5

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


class Muon(torch.optim.Optimizer):
    """Muon over matrices, with Nesterov momentum; matrices of one shape are updated together.

    Updates are made nearly orthogonal. A small GPT-2 needs a third of the steps that AdamW needs. Source: Jordan et al.
    2024, https://kellerjordan.github.io/posts/muon; the scale of Liu et al. 2025, arXiv:2502.16982.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        of_shape: dict[torch.Size, list[Tensor]] = {}
        for matrix in matrices:
            of_shape.setdefault(matrix.shape, []).append(matrix)
        groups = [{"params": each} for each in of_shape.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure
        """Update every matrix from its gradient."""
        for group in self.param_groups:
            weights = group["params"]
            gradient = torch.stack([weight.grad for weight in weights])
            average = self.state[weights[0]].setdefault("average", torch.zeros_like(gradient))
            average.lerp_(gradient, 1 - group["momentum"])
            updates = orthogonalized(gradient.lerp(average, group["momentum"]))
            # an update of the same size whatever the shape
            rows, columns = weights[0].shape
            scale = max(1.0, rows / columns) ** 0.5
            for weight, update in zip(weights, updates, strict=True):
                weight.add_(update, alpha=-group["lr"] * scale)


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return matrices of the same shape, `[..., rows, columns]`, with singular values near 1.

    The rounds multiply small square matrices: products of the polynomial in `x @ x.T`, then one product with `x`.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    gram = x @ x.mT
    identity = a * torch.eye(gram.shape[-1])
    product = None
    for i in range(_ROUNDS):
        factor = identity + b * gram + c * gram @ gram
        product = factor if product is None else factor @ product
        if i + 1 < _ROUNDS:
            gram = factor @ gram @ factor
    assert product is not None
    out: Tensor = product @ x
    return out.mT if is_tall else out

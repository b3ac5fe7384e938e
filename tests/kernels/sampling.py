"""Helpers of the sampling tests: a sort in float64, and random rows."""

import numpy as np
import torch

LARGEST = np.finfo(np.float32).max


def sorted_probabilities(logits, temperature, top_k, top_p, min_p):
    """Return the probability of each token of one row, by sorting it in float64."""
    x = np.nan_to_num(logits.numpy(), nan=-np.inf, posinf=LARGEST, neginf=-np.inf).astype(float)
    best_first = np.lexsort((np.arange(len(x)), -x))
    weight = np.zeros(len(x))
    if temperature == 0 or np.isneginf(x).all():
        weight[best_first[0]] = 1
        return weight
    kept = np.exp((x[best_first] - x.max()) / temperature)
    if top_k:
        kept[top_k:] = 0
    if top_p < 1:
        before = np.cumsum(kept) - kept
        kept[1:][before[1:] >= top_p * kept.sum()] = 0
    kept[kept < min_p] = 0
    weight[best_first] = kept / kept.sum()
    return weight


def drawn_token(probabilities, uniform):
    """Return the first token at which the sum of the probabilities exceeds `uniform`."""
    return int((np.cumsum(probabilities) <= uniform).sum())


def limits(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, device="cpu"):
    """Return temperature, top_k, top_p and min_p as tensors, the same for all rows."""
    return (
        torch.full((rows,), temperature, dtype=torch.float32, device=device),
        torch.full((rows,), top_k, dtype=torch.int32, device=device),
        torch.full((rows,), top_p, dtype=torch.float32, device=device),
        torch.full((rows,), min_p, dtype=torch.float32, device=device),
    )


def random_rows(rows, vocabulary, seed, *, top_ks=(0, 0, 1, 5, 50, 70, 300, 2000)):
    """Return arguments of `sample_tokens`; rows have different limits, some ties, NaN and infinities."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, vocabulary)) * rng.choice([0.01, 1, 3, 10], (rows, 1))
    tied = rng.random(rows) < 0.4
    logits[tied] = logits[tied].round()
    for value in (-np.inf, np.nan, np.inf):
        logits[(rng.random((rows, 1)) < 0.1) & (rng.random(logits.shape) < 0.4)] = value
    return (
        torch.from_numpy(logits.astype(np.float32)),
        torch.from_numpy(rng.choice([0, 0.3, 1, 2.5], rows).astype(np.float32)),
        torch.from_numpy(rng.choice(top_ks, rows).astype(np.int32)),
        torch.from_numpy(rng.choice([1, 1, 0.1, 0.5, 0.95, 0], rows).astype(np.float32)),
        torch.from_numpy(rng.choice([0, 0, 0.05, 0.5, 1], rows).astype(np.float32)),
        torch.from_numpy(rng.random(rows)),
    )


def expected_tokens(logits, temperature, top_k, top_p, min_p, uniform):
    """Return the token of each row by `sorted_probabilities`."""
    settings = zip(*(x.tolist() for x in (temperature, top_k, top_p, min_p)), strict=True)
    return [
        drawn_token(sorted_probabilities(row, *limits_of_row), u)
        for row, limits_of_row, u in zip(logits.cpu(), settings, uniform.tolist(), strict=True)
    ]

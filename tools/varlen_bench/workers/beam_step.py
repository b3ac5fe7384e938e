"""The isolated step of beam search on a CPU, without the model: `beam_step` beside torch.

torch: log_softmax, the sum with the scores of the beams, topk of 2K, and a copy of the cache of keys and values in the
order of the new beams. varlen: `beam_step`, and copies of KV blocks: at most one for each beam but the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from varlen_bench.harness.summary import Spread
from varlen_bench.harness.worker import Message, run_once
from varlen_bench.workers.beam import BEAMS
from varlen_kernels import cpu

SEQUENCES = (1, 8, 32)
VOCABULARIES = (32_000, 250_000)
# Transformer-base: keys and values of each layer, at this length of an answer.
_LAYERS, _HEADS, _HEAD_DIM, _LENGTH = 6, 8, 64, 20
_BLOCK_TOKENS = 16
_WIDTH = 2 * BEAMS
# Adjacent logits in one group of LightSeq's rule.
_STRIPE = 32
_LEAST_REPEATS, _SECONDS = 5, 0.5


def measure_step(sequences: int, vocabulary: int) -> dict[str, float]:
    """Return the median times of a step on random logits, in microseconds, and their ratio.

    `step_us` is the time of `beam_step`, `blocks_us` of the largest possible number of copies of KV blocks, `torch_us`
    of log_softmax, sum and topk, and `reorder_us` of the copy of the cache. `survivors` is the mean number of logits of
    a row that reach LightSeq's threshold.

    Raises:
        RuntimeError: the two find other scores.
    """
    numbers = torch.Generator().manual_seed(0)
    rows = sequences * BEAMS
    logits = 3 * torch.randn(rows, vocabulary, generator=numbers)
    scores = torch.randn(sequences, BEAMS, generator=numbers) - 10
    cache = torch.zeros(2 * _LAYERS, rows, _HEADS, _LENGTH, _HEAD_DIM)
    blocks = torch.zeros(2 * _LAYERS, 2 * rows, _HEADS, _BLOCK_TOKENS, _HEAD_DIM)
    parents = torch.randint(rows, (rows,), generator=numbers)
    copied = torch.arange(rows).view(sequences, BEAMS)[:, 1:].flatten()
    copies = torch.stack((copied, rows + copied), 1).int()

    def search() -> Tensor:
        log_prob = torch.log_softmax(logits, dim=-1).view(sequences, BEAMS, -1)
        return (log_prob + scores[..., None]).view(sequences, -1).topk(_WIDTH).values

    def reorder() -> None:
        for layer in cache:
            layer.index_select(0, parents)

    def fork() -> None:
        cpu.copy_blocks(blocks, copies)

    def step() -> Tensor:
        found: Tensor = cpu.beam_step(logits, scores, width=_WIDTH).scores
        return found

    with torch.inference_mode():
        if not torch.allclose(step(), search(), rtol=1e-5, atol=1e-4):
            raise RuntimeError("beam_step and torch find different scores")
        found = {
            "step_us": _median_us(step),
            "blocks_us": _median_us(fork),
            "torch_us": _median_us(search),
            "reorder_us": _median_us(reorder),
        }
    ours, theirs = (
        found[first] + found[second]
        for first, second in (("step_us", "blocks_us"), ("torch_us", "reorder_us"))
    )
    survivors = mean_survivors(logits, groups=_WIDTH)
    return {**found, "survivors": survivors, "step_vs_torch": theirs / ours}


def mean_survivors(logits: Tensor, groups: int) -> float:
    """Return the mean number of logits per row above the least group maximum.

    This is the threshold of LightSeq's rule.

    Source: Wang et al. 2021, arXiv:2010.13887, section 3.2.
    """
    owner = torch.arange(logits.shape[1]) // _STRIPE % groups
    maxima = [logits[:, owner == group].amax(1) for group in range(groups)]
    bound = torch.stack(maxima).amin(0)
    return float((logits >= bound[:, None]).sum(1).double().mean())


def _median_us(call: Callable[[], object]) -> float:
    call()
    samples: list[float] = []
    began = time.perf_counter()
    while len(samples) < _LEAST_REPEATS or time.perf_counter() - began < _SECONDS:
        start_of_call = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start_of_call)
    return 1e6 * Spread.of(samples).median


def measure_all(argument: Message) -> Message:
    """Return the figures of each shape, by its name in rows."""
    torch.set_num_threads(argument["threads"])
    return {
        f"{sequences}x{BEAMS}x{vocabulary}": measure_step(sequences, vocabulary)
        for sequences, vocabulary in product(SEQUENCES, VOCABULARIES)
    }


if __name__ == "__main__":
    run_once(measure_all)

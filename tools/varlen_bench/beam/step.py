"""The isolated step of beam search on a CPU, without the model: `beam_step` beside torch.

torch: log_softmax, the sum with the scores of the beams, topk of 2K, and a copy of the cache of keys and values in the
order of the new beams. varlen: `beam_step`, and copies of KV blocks: at most one for each beam but the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product

import torch
from torch import Tensor

from varlen_bench.beam.systems import BEAMS
from varlen_bench.harness.summary import Spread
from varlen_bench.harness.worker import Message, run_once
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


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Median times of a step in microseconds.

    Attributes:
        sequences, vocabulary: shape of the step, with `BEAMS` beams.
        step_us: time of `beam_step`.
        blocks_us: time of the largest possible number of copies of KV blocks.
        torch_us: time of log_softmax, sum and topk.
        reorder_us: time of the copy of the cache.
        survivors: logits of a row that reach LightSeq's threshold, on average.
    """

    sequences: int
    vocabulary: int
    step_us: float
    blocks_us: float
    torch_us: float
    reorder_us: float
    survivors: float

    @property
    def speedup(self) -> float:
        """Time of torch over time of varlen."""
        return (self.torch_us + self.reorder_us) / (self.step_us + self.blocks_us)


def measure_step(sequences: int, vocabulary: int) -> StepTimes:
    """Return the times of a step on random logits.

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
        return cpu.beam_step(logits, scores, width=_WIDTH).scores

    with torch.inference_mode():
        if not torch.allclose(step(), search(), rtol=1e-5, atol=1e-4):
            raise RuntimeError("beam_step and torch find different scores")
        return StepTimes(
            sequences,
            vocabulary,
            step_us=_median_us(step),
            blocks_us=_median_us(fork),
            torch_us=_median_us(search),
            reorder_us=_median_us(reorder),
            survivors=mean_survivors(logits, groups=_WIDTH),
        )


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
    """Return the times of all shapes."""
    torch.set_num_threads(argument["threads"])
    shapes = product(SEQUENCES, VOCABULARIES)
    return {"steps": [asdict(measure_step(*shape)) for shape in shapes]}


if __name__ == "__main__":
    run_once(measure_all)

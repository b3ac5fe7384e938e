"""How near a decode step comes to what the machine can do: `decode_fraction_of_limit`.

A step reads all weights and the keys and values of its sequences, and multiplies every weight by every sequence. The
limit is the larger of the two times, at the bandwidth and at the rate of matrix products measured here.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

from varlen_bench.compare.passes import Requests, drive_iterations
from varlen_bench.generate import engines
from varlen_bench.generate.systems import OURS, SYSTEMS
from varlen_bench.harness.worker import Message, run_once
from varlen_tools.workloads import token_ids

RUNNING, _CONTEXT, _STEPS = 32, 128, 32
_READ_BYTES = 2**28
_REPEATS = 15
_FLOAT = 4


def decode_seconds(checkpoint: Path, *, threads: int) -> float:
    """Return the median seconds of a step while `RUNNING` sequences decode."""
    vocabulary = _sizes(checkpoint)[2]
    prompts = token_ids([_CONTEXT] * RUNNING, vocabulary, seed=0)
    system = SYSTEMS[OURS]
    submit = engines.load_iteration(system, checkpoint, system.cores(threads))
    # prompts are computed over several steps: sequences start, and end, one after another
    requests = Requests.at_once("decode", prompts, [3 * _STEPS] * RUNNING)
    drive_iterations(submit, requests)
    answers = drive_iterations(submit, requests)
    begin = max(answer.moments[0] for answer in answers)
    end = min(answer.moments[-1] for answer in answers)
    moments = [moment for moment in answers[0].moments if begin <= moment <= end]
    return statistics.median(after - before for before, after in pairwise(moments))


def limit_seconds(checkpoint: Path) -> float:
    """Return the seconds of the fastest possible step, in fp32."""
    hidden, layers, vocabulary = _sizes(checkpoint)
    weights = 12 * layers * hidden**2 + vocabulary * hidden
    # the mean context of the measured steps; keys and values
    cached = 2 * layers * hidden * RUNNING * (_CONTEXT + 3 * _STEPS // 2)
    memory = _FLOAT * (weights + cached) / read_bandwidth()
    return max(memory, 2 * (RUNNING * weights + cached) / product_rate(hidden))


def read_bandwidth() -> float:
    """Return the bytes/s that a sum over a large tensor reads."""
    values = torch.ones(_READ_BYTES // _FLOAT)
    return _READ_BYTES / _best_seconds(values.sum)


def product_rate(hidden: int) -> float:
    """Return the FLOP/s of the products of a feed-forward layer on `RUNNING` sequences."""
    x, weight = torch.ones(RUNNING, hidden), torch.ones(4 * hidden, hidden)
    seconds = _best_seconds(lambda: torch.nn.functional.linear(x, weight))
    return 2 * x.numel() * weight.shape[0] / seconds


def _best_seconds(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_REPEATS):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


def _sizes(checkpoint: Path) -> tuple[int, int, int]:
    """Return hidden size, layers and vocabulary of a GPT-2 checkpoint."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return config["n_embd"], config["n_layer"], config["vocab_size"]


def measure(argument: Message) -> Message:
    """Return the seconds of a decode step, and of the fastest possible one."""
    checkpoint, threads = Path(argument["checkpoint"]), argument["threads"]
    torch.set_num_threads(threads)
    limit = limit_seconds(checkpoint)
    return {"limit": limit, "step": decode_seconds(checkpoint, threads=threads)}


if __name__ == "__main__":
    run_once(measure)

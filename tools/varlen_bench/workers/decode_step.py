"""How near a decode step comes to what the machine can do: `decode_fraction_of_limit`.

A step reads all weights and the keys and values of its sequences, and multiplies every weight by every sequence. The
limit is the larger of the two times, at the bandwidth and at the rate of matrix products measured here.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from varlen_bench.compare.passes import Requests, drive_iterations
from varlen_bench.harness.worker import Message, run_once
from varlen_bench.peers.checkpoints import config_field
from varlen_bench.workers.generate import OURS, SYSTEMS, load_iteration
from varlen_bench.workloads import token_ids

RUNNING, _CONTEXT, _STEPS = 32, 128, 32
_READ_BYTES = 2**28
_REPEATS = 15
_FLOAT = 4


def decode_seconds(checkpoint: Path, *, threads: int) -> float:
    """Return the median seconds of a step while `RUNNING` sequences decode."""
    vocabulary = config_field(checkpoint, "vocab_size")
    prompts = token_ids([_CONTEXT] * RUNNING, vocabulary, seed=0)
    system = SYSTEMS[OURS]
    submit = load_iteration(system, checkpoint, system.cores(threads))
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
    sizes = _sizes(checkpoint)
    # the mean context of the measured steps
    cached = sizes.cached * RUNNING * (_CONTEXT + 3 * _STEPS // 2)
    memory = _FLOAT * (sizes.weights + cached) / read_bandwidth()
    products = RUNNING * sizes.weights + cached * sizes.queries_per_key
    return max(memory, 2 * products / product_rate(sizes.hidden))


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


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of a decoder.

    Attributes:
        weights: numbers in its matrices, without the embeddings that it looks up.
        cached: numbers in the keys and values of a token.
        queries_per_key: query heads that share a key head.
    """

    hidden: int
    weights: int
    cached: int
    queries_per_key: int


def _sizes(checkpoint: Path) -> _Sizes:
    """Return the sizes of a GPT-2 or Llama checkpoint."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] == "gpt2":
        hidden, layers, queries_per_key = config["n_embd"], config["n_layer"], 1
        feed_forward = 8 * hidden**2
    else:
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        queries_per_key = config["num_attention_heads"] // config["num_key_value_heads"]
        feed_forward = 3 * hidden * config["intermediate_size"]
    keys = hidden // queries_per_key
    layer = 2 * hidden**2 + 2 * hidden * keys + feed_forward
    weights = layers * layer + config["vocab_size"] * hidden
    return _Sizes(hidden, weights, 2 * layers * keys, queries_per_key)


def measure(argument: Message) -> Message:
    """Return the milliseconds of a decode step, and of the fastest possible one."""
    checkpoint, threads = Path(argument["checkpoint"]), argument["threads"]
    torch.set_num_threads(threads)
    limit = limit_seconds(checkpoint)
    return {"step_ms": 1000 * decode_seconds(checkpoint, threads=threads), "limit_ms": 1000 * limit}


if __name__ == "__main__":
    run_once(measure)

"""A model's load, its answers, and unused places.

A load captures a CUDA graph for every batch size, which takes time and memory. A graph has places for more sequences
than a batch has; attention pays for them.
"""

import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import torch

from varlen.config import EngineConfig
from varlen.execution.runner import Runner
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import RequestOptions
from varlen_bench.gpu_report.figures import Figure, figure
from varlen_bench.kernels.encoder import random_prompts
from varlen_bench.kernels.machine import Machine
from varlen_bench.kernels.timing import WARM, host_time
from varlen_bench.ops.table import op_call
from varlen_bench.peers.checkpoints import BERT_BASE, MINILM, EncoderShape, random_checkpoint

_MAX_BATCH_TOKENS = 4096
_POSITIONS = 512
# Number and length of the sequences of a batch.
_BATCHES = ((1, 20), (8, 20), (64, 13), (16, 64), (16, 250))
_HOST_PASSES = 60
# Tokens of each sequence, and places over sequences.
_LENGTHS = (64, 250)
_ROOMS = (1, 4, 16)


def measure_load(
    shape: EncoderShape, machine: Machine, batches: tuple[tuple[int, int], ...], max_tokens: int
) -> Iterator[Figure]:
    """Yield the cost of two loads of a random checkpoint, and times of answers.

    Only the first load may compile.
    """
    is_cuda = machine.device.type == "cuda"
    config = EngineConfig(
        device="cuda" if is_cuda else "cpu",
        dtype="bf16",
        max_batch_tokens=max_tokens,
        max_sequence_tokens=min(max_tokens, _POSITIONS),
    )
    with random_checkpoint(shape, _POSITIONS) as folder:
        for name in ("first load", "second load"):
            free, began = _free_memory(machine), time.perf_counter()
            with closing(Runner(Checkpoint.open(folder), config)) as runner:
                seconds = time.perf_counter() - began
                yield figure("load", shape.name, name, seconds, "s")
                if free is not None:
                    used = free - (_free_memory(machine) or 0)
                    yield figure("load", shape.name, f"{name}, memory", used / 2**20, "MiB")
                yield from _graphs(shape, name, runner)
                if name == "second load":
                    own = runner.info.weight_bytes + runner.info.arena_bytes
                    yield figure("load", shape.name, "weights and arena", own / 2**20, "MiB")
                    yield from _answers(shape, runner, batches)
        if is_cuda:
            torch.cuda.empty_cache()


def _graphs(shape: EncoderShape, load: str, runner: Runner) -> Iterator[Figure]:
    use = runner.graph_use
    if use.count:
        yield figure("load", shape.name, f"{load}, graphs", use.count, "graphs")
        yield figure("load", shape.name, f"{load}, captures", use.seconds, "s")
        yield figure("load", shape.name, f"{load}, memory of graphs", use.num_bytes / 2**20, "MiB")


def _answers(
    shape: EncoderShape, runner: Runner, batches: tuple[tuple[int, int], ...]
) -> Iterator[Figure]:
    for count, length in batches:
        prompts = random_prompts([length] * count, shape.vocabulary)
        options = [RequestOptions()] * count
        spent = host_time(partial(runner.run, prompts, options), _HOST_PASSES)
        case = f"{shape.name} {count}x{length}"
        yield figure("answer", case, "from ids to vectors on the host", spent.median, "us")


@torch.inference_mode()
def measure_rooms(machine: Machine, tokens: int, lengths: tuple[int, ...]) -> Iterator[Figure]:
    """Yield the time of attention by the number of places in `cu_seqlens`."""
    for length in lengths:
        count = max(1, tokens // length)
        for factor in _ROOMS:
            sizes: dict[str, Any] = {"lengths": [length] * count, "slots": factor * count}
            call = op_call("attention_varlen", torch.bfloat16, "tiles", **sizes)
            inputs = call.make(machine.device, 0)
            call.prepare(machine.kernels, inputs)
            spent = machine.timer.graph(partial(call.run, machine.kernels), [inputs], WARM)
            name = f"attention with places for {factor * count}"
            yield figure("room", f"{count}x{length}", name, spent.median, "us")


def measure_all(machine: Machine) -> Iterator[Figure]:
    """Yield all figures."""
    yield from measure_load(MINILM, machine, _BATCHES, _MAX_BATCH_TOKENS)
    yield from measure_rooms(machine, _MAX_BATCH_TOKENS, _LENGTHS)
    yield from measure_load(BERT_BASE, machine, _BATCHES, _MAX_BATCH_TOKENS)


def _free_memory(machine: Machine) -> int | None:
    """Return the free bytes of the device; None on a CPU."""
    if machine.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free: int = torch.cuda.mem_get_info()[0]
    return free

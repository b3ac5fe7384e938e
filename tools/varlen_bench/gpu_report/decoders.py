"""Random decoders on a GPU: first loads, steps, and requests that generate."""

import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from varlen.config import EngineConfig
from varlen.costs.model import BatchShape
from varlen.execution.cuda.runner import CudaSteps
from varlen.execution.runner import Runner
from varlen.in_process.generator import Generation, Generator
from varlen.request.generation import GenerationOptions
from varlen.request.request import Prompt, Request, RequestOptions
from varlen.scheduling.batch import Batch, Chunk, GeneratedSequence, unanswered_sequences
from varlen.service.generation import GeneratorParts
from varlen.service.service import Service
from varlen.telemetry.metrics import Stats
from varlen_bench.gpu_report.figures import MUST_BE_0, Figure, device_time, figure
from varlen_bench.kernels.machine import Machine
from varlen_bench.kernels.timing import copy_rate, host_time
from varlen_bench.peers.checkpoints import GPT2_SMALL, GeneratorShape, save_random_decoder

_HOST_PASSES = 20
_COPY_BYTES = 1 << 30
_GREEDY = GenerationOptions(temperature=0.0)
_SAMPLED = GenerationOptions(temperature=0.8, top_k=50, top_p=0.9, seed=1)
# Token ids of prompts are below the vocabulary of every decoder.
_IDS = 250
# A search has rows for each beam, and each of them takes a sequence.
_SEARCHES_PART = 8
# The tokenizer of the Llama, whose prompts are token ids.
_BYTES = GeneratorShape("bytes", 16, 1, 1, positions=16, vocabulary=300)
_LLAMA_1B = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128_256,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True, slots=True)
class DecoderGrid:
    """What a stage runs on decoders.

    Attributes:
        save: saves the checkpoint of each decoder in a folder, by name.
        steps: sequences of a decode step, and the tokens of their contexts.
        chunks: tokens of a prompt that runs beside the sequences of the last step.
        requests: numbers of requests that are answered together.
    """

    save: Mapping[str, Callable[[Path], None]]
    settings: Mapping[str, Any] = field(
        default_factory=lambda: {
            "dtype": "bf16",
            "max_running_sequences": 64,
            "max_sequence_tokens": 1024,
            "kv_bytes": "25%",
        }
    )
    steps: tuple[tuple[int, int], ...] = (
        (64, 512),
        (64, 128),
        (32, 1000),
        (8, 1000),
        (1, 1000),
        (1, 128),
    )
    chunks: tuple[int, ...] = (64, 448)
    requests: tuple[int, ...] = (64, 8)
    prompt_tokens: int = 128
    answer_tokens: int = 128
    num_beams: int = 4


def save_random_llama(folder: Path, device: str = "cuda", **fields: Any) -> None:
    """Save a LlamaForCausalLM with random weights in bf16, and a tokenizer of bytes.

    Args:
        device: device that makes the weights; a GPU takes seconds less.
    """
    import transformers

    save_random_decoder(_BYTES, folder)
    config = transformers.LlamaConfig(
        **{**_LLAMA_1B, **fields}, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)


SERVED = DecoderGrid(
    {
        "gpt2-small": lambda folder: save_random_decoder(GPT2_SMALL, folder),
        "llama-1b": save_random_llama,
    }
)


@contextmanager
def loaded(name: str, grid: DecoderGrid) -> Iterator[Service[GeneratorParts]]:
    """Yield a random decoder on the GPU."""
    with TemporaryDirectory(prefix="varlen-report-") as folder:
        grid.save[name](Path(folder))
        config = EngineConfig(device="cuda", warmup_seconds=0, **grid.settings)
        with closing(Service.load(GeneratorParts, folder, config, Stats())) as service:
            yield service


def new_sequence(options: GenerationOptions, length: int = 1) -> GeneratedSequence:
    """Return a sequence after a prompt of `length` tokens; no client waits for it."""
    prompt = Prompt(np.zeros(length, np.int32))
    (sequence,) = unanswered_sequences(Request((prompt,), RequestOptions(generation=options)))
    assert isinstance(sequence, GeneratedSequence)
    return sequence


def decode_chunks(
    runner: Runner, count: int, context: int, options: GenerationOptions
) -> tuple[Chunk, ...]:
    """Return a token of each of `count` sequences, whose contexts have blocks of their own."""
    each = -(-context // runner.info.block_size)
    chunks = []
    for index in range(count):
        sequence = new_sequence(options)
        places = range(index * each, (index + 1) * each)
        blocks = array("i", [place % runner.info.num_blocks for place in places])
        token_ids = (index % runner.info.vocab_size,)
        chunks.append(Chunk(sequence, context - 1, token_ids, blocks, (sequence,)))
    return tuple(chunks)


def prompt_chunk(runner: Runner, length: int, options: GenerationOptions) -> Chunk:
    """Return a whole prompt of `length` tokens, which samples a token."""
    sequence = new_sequence(options, length)
    blocks = array("i", range(-(-length // runner.info.block_size)))
    places = tuple(range(options.num_beams)) if sequence.is_searched else ()
    return Chunk(sequence, 0, (0,) * length, blocks, (sequence,), beam_slots=places)


def step_of(chunks: tuple[Chunk, ...]) -> Batch:
    """Return the step of these chunks."""
    shape = BatchShape.of([len(chunk.token_ids) for chunk in chunks])
    return Batch(tuple(chunk.sequence for chunk in chunks), shape, 0.0, "bench", chunks)


def measure_steps(name: str, grid: DecoderGrid, bandwidth: float) -> Iterator[Figure]:
    """Yield the times of a decoder's steps; `bandwidth` is in bytes a second."""
    row = partial(figure, "decode")
    with loaded(name, grid) as service:
        runner, use = service.model.runner, service.model.runner.graph_use
        assert isinstance(runner, Runner)
        yield row(name, "captures", use.seconds, "s")
        yield row(name, "memory of graphs", use.num_bytes / 2**20, "MiB")
        for count, context in grid.steps:
            yield from _steps(f"{name} {count}x{context}", runner, count, context, bandwidth)
        count, context = grid.steps[0]
        beside = decode_chunks(runner, count // 2, context, _GREEDY)
        for length in grid.chunks:
            step = step_of((*beside, prompt_chunk(runner, length, _GREEDY)))
            spent = host_time(partial(runner.run_batch, step), _HOST_PASSES).median
            yield row(f"{name} {length} beside {len(beside)}", "step with a prompt", spent, "us")


def _steps(
    case: str, runner: Runner, count: int, context: int, bandwidth: float
) -> Iterator[Figure]:
    """Yield the times of one size of decode step: its graph, and whole steps."""
    row = partial(figure, "decode", case)
    greedy = step_of(decode_chunks(runner, count, context, _GREEDY))
    first, again = runner.run_batch(greedy), runner.run_batch(greedy)
    yield row("tokens that differ in a second run", _num_different(first, again), MUST_BE_0)
    steps = runner.decoder.steps
    assert isinstance(steps, CudaSteps)
    with steps.stream():
        graph = device_time(steps.graph())
    kept = count * context * runner.info.block_bytes / runner.info.block_size
    roofline = 1e6 * (runner.info.weight_bytes + kept) / bandwidth
    yield row("graph", graph, "us")
    yield row("graph, part of the roofline", roofline / graph, "1 is a copy")
    sampled = step_of(decode_chunks(runner, count, context, _SAMPLED))
    for kind, step in (("greedy", greedy), ("sampled", sampled)):
        whole = host_time(partial(runner.run_batch, step), _HOST_PASSES).median
        yield row(f"whole {kind} step", whole, "us")
        yield row(f"whole {kind} step, part of the roofline", roofline / whole, "1 is a copy")


def _num_different(first: object, again: object) -> int:
    assert isinstance(first, list)
    assert isinstance(again, list)
    return sum(one != other for one, other in zip(first, again, strict=True))


def first_loads(_: Machine) -> Iterator[Figure]:
    """Yield the time of the first load of each decoder, with what it compiles."""
    for name in SERVED.save:
        began = time.perf_counter()
        with loaded(name, SERVED):
            yield figure("load", name, "first load", time.perf_counter() - began, "s")


def measure_requests(name: str, grid: DecoderGrid) -> Iterator[Figure]:
    """Yield tokens per second of a decoder, by number of requests."""
    row = partial(figure, "serve")
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0, "ignore_eos": True},
        "sampled": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 1, "ignore_eos": True},
        "beams": {"num_beams": grid.num_beams},
    }
    numbers = np.random.default_rng(0)
    with loaded(name, grid) as service:
        generator = Generator(service)
        for count in grid.requests:
            prompts = [numbers.integers(1, _IDS, grid.prompt_tokens).tolist() for _ in range(count)]
            for kind, options in kinds.items():
                some = prompts[: max(1, count // _SEARCHES_PART)] if kind == "beams" else prompts
                case = f"{name} {len(some)} requests"
                # the first request of a kind may compile
                generator.generate(some, max_tokens=2, **options)
                began = time.perf_counter()
                answers = generator.generate(some, max_tokens=grid.answer_tokens, **options)
                spent = time.perf_counter() - began
                yield row(case, kind, _num_tokens(answers) / spent, "tokens/s")
                yield row(case, f"{kind}, time of a token", 1e3 * spent / _longest(answers), "ms")


def _num_tokens(answers: list[Generation]) -> int:
    return sum(len(answer.token_ids) for answer in answers)


def _longest(answers: list[Generation]) -> int:
    return max(len(answer.token_ids) for answer in answers)


def steps(machine: Machine) -> Iterator[Figure]:
    """Yield decode steps beside the memory that they must read.

    The roofline of a step is the time of a copy of as many bytes: its weights, keys and values.
    """
    bandwidth = 1e9 * copy_rate(machine.timer, machine.device, _COPY_BYTES)
    yield figure("decode", "device", "copy", bandwidth / 1e12, "TB/s")
    for name in SERVED.save:
        yield from measure_steps(name, SERVED, bandwidth)


def requests(_: Machine) -> Iterator[Figure]:
    """Yield requests that generate, in a closed loop."""
    for name in SERVED.save:
        yield from measure_requests(name, SERVED)

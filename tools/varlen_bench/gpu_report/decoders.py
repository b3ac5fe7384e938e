"""Decoders of the report: random checkpoints, loaded services, and steps of a chosen size."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from varlen.config import EngineConfig
from varlen.costs.batch_shape import BatchShape
from varlen.execution.step_runner import StepRunner
from varlen.request.generation import GenerationOptions
from varlen.request.request import Prompt, Request, RequestOptions
from varlen.scheduling.batch import Batch, Chunk
from varlen.scheduling.sequence import GeneratedSequence, unanswered_sequences
from varlen.service.generation import Iterative
from varlen.service.service import Service
from varlen.telemetry.metrics import Stats
from varlen_bench.peers.checkpoints import GPT2_SMALL, GeneratorShape, save_random_decoder

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
        settings: settings of the model.
        steps: sequences of a decode step, and the tokens of their contexts.
        chunks: tokens of a prompt that runs beside the sequences of the last step.
        requests: numbers of requests that are answered together.
        prompt_tokens, answer_tokens: tokens of each prompt and answer.
        num_beams: beams of a request that searches.
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
        folder: folder of the checkpoint.
        device: device that makes the weights; a GPU takes seconds less.
        fields: fields of the configuration.
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
def loaded(name: str, grid: DecoderGrid) -> Iterator[Service[Iterative]]:
    """Yield a random decoder on the GPU."""
    with TemporaryDirectory(prefix="varlen-report-") as folder:
        grid.save[name](Path(folder))
        config = EngineConfig(device="cuda", warmup_seconds=0, **grid.settings)
        with closing(Service.load(Iterative, folder, config, Stats())) as service:
            yield service


def new_sequence(options: GenerationOptions) -> GeneratedSequence:
    """Return a sequence that no request of a client waits for."""
    prompt = Prompt(np.zeros(1, np.int32))
    (sequence,) = unanswered_sequences(Request((prompt,), RequestOptions(generation=options)))
    assert isinstance(sequence, GeneratedSequence)
    return sequence


def decode_chunks(
    runner: StepRunner, count: int, context: int, options: GenerationOptions
) -> tuple[Chunk, ...]:
    """Return a token of each of `count` sequences, whose contexts have blocks of their own."""
    each = -(-context // runner.kv.block_size)
    chunks = []
    for index in range(count):
        sequence = new_sequence(options)
        blocks = tuple((index * each + place) % runner.kv.num_blocks for place in range(each))
        token_ids = (index % runner.vocab_size,)
        chunks.append(Chunk(sequence, context - 1, token_ids, blocks, (sequence,)))
    return tuple(chunks)


def prompt_chunk(runner: StepRunner, length: int, options: GenerationOptions) -> Chunk:
    """Return a whole prompt of `length` tokens, which samples a token."""
    sequence = new_sequence(options)
    blocks = tuple(range(-(-length // runner.kv.block_size)))
    places = tuple(range(options.num_beams)) if sequence.is_searched else ()
    return Chunk(sequence, 0, (0,) * length, blocks, (sequence,), beam_places=places)


def step_of(chunks: tuple[Chunk, ...]) -> Batch:
    """Return the step of these chunks."""
    shape = BatchShape.of([len(chunk.token_ids) for chunk in chunks])
    return Batch(tuple(chunk.sequence for chunk in chunks), shape, 0.0, "bench", chunks)

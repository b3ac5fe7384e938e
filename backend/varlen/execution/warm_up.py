"""Batches and steps that run before a model serves.

They show whether it computes numbers, and compile what its steps need: on a GPU, the batch of a capture has no
sequence, and runs little of attention. Which kernels run depends on the mean new tokens of a step, on whether it has
several sequences, and on whether single tokens beside prompts are read in splits.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from varlen.costs.model import BatchShape
from varlen.errors import ConfigError
from varlen.execution.cuda.graphs import Bucket
from varlen.execution.cuda.runner import CudaRunner
from varlen.execution.executor import call_within
from varlen.execution.model_info import ModelInfo
from varlen.execution.one_shot import OneShot
from varlen.execution.packing import pack_step
from varlen.request.generation import GenerationOptions
from varlen.request.request import Int32Array, Prompt, Request, RequestOptions, Source
from varlen.scheduling.batch import Batch, Chunk, GeneratedSequence, unanswered_sequences
from varlen.scheduling.device_plan import Chosen, DevicePlan, Draws, Edits, SearchRules
from varlen_kernels.reference.logit_edits import NO_SLOT

if TYPE_CHECKING:
    from varlen.execution.runner import Runner
    from varlen.execution.token_state import Chooser

_log = logging.getLogger(__name__)

# Time in which a first step may compile its kernels, in seconds. Other processes may use the cores meanwhile.
_COMPILE_SECONDS = 240.0

_GREEDY = GenerationOptions(temperature=0.0)
_BLOCK = array("i", [0])
_DRAWN = GenerationOptions(top_k=2, top_p=0.5)
_EDITED = replace(_DRAWN, repetition_penalty=2.0)
# the host chooses these, also where a GPU draws others
_REPORTED = replace(_EDITED, logprobs=0)


def check_numbers(runner: Runner, timeout: float = 0.0) -> None:
    """Run a random batch of an encoder in the largest graph of each mean length.

    Without graphs, run a large one, and one sequence of each of some lengths.

    Args:
        runner: runs them, on a GPU.
        timeout: longest time of each, in seconds; 0 is no limit.

    Raises:
        ConfigError: an answer holds NaN.
        ModelFaultError: the GPU does not end a batch.
    """
    numbers = np.random.default_rng(0)
    state, info = runner.state, runner.info
    assert isinstance(state, OneShot)
    if isinstance(state.device, CudaRunner):
        largest = state.device.buckets.largest_of_each_class()
    else:
        largest = _padded_batches(info, runner.arena.largest["sequences"] // 2)
    for bucket in largest:
        lengths = random_lengths(bucket, info.max_sequence_tokens, numbers)
        prompts = [
            Prompt(
                numbers.integers(0, info.vocab_size, length, dtype=np.int32),
                numbers.integers(0, info.type_vocab_size, length, dtype=np.int32),
                payload=info.payload_of(length),
            )
            for length in lengths.tolist()
        ]
        options = [RequestOptions(normalize=index % 2 == 0) for index in range(len(prompts))]
        answers = call_within(timeout, partial(state.run, prompts, options))
        if any(np.isnan(answer).any() for answer in answers):
            raise ConfigError(
                f"a random batch of {len(prompts)} sequences, {int(lengths.sum())} tokens, has answers with NaN in"
                f" {info.dtype} on {info.device_name}: set dtype to bf16 or fp32, or device to cpu"
            )
    _log.info("%d random batches have no NaN in their answers", len(largest))


def _padded_batches(info: ModelInfo, most: int) -> list[Bucket]:
    """Return the largest batch without graphs, and lengths for which the masked softmax is compiled.

    Args:
        most: sequences of the largest batch.
    """
    longest = min(info.max_sequence_tokens, info.max_batch_tokens)
    count = min(most, info.max_batch_tokens // longest)
    # with padding it fills the largest batch
    batches = [Bucket(-(-3 * longest * count // 4), count)]
    powers = [longest, *(1 << bits for bits in range(longest.bit_length()))]
    # vectors of 8, 4, 2 and 1 keys
    lengths = {power - less for power in powers for less in (0, 1, 2, 4)}
    return [*batches, *(Bucket(length, 1) for length in sorted(lengths) if length > 0)]


def random_lengths(bucket: Bucket, longest: int, numbers: np.random.Generator) -> Int32Array:
    """Return random lengths that fill a bucket, none above `longest`."""
    tokens, count = bucket.tokens, bucket.sequences
    lengths = np.full(count, tokens // count, dtype=np.int32)
    lengths[: tokens % count] += 1
    lengths = np.minimum(lengths, longest)
    # tokens move from one half of the sequences to the other
    half = count // 2
    gains, gives = lengths[:half], lengths[count - half :]
    moved = numbers.integers(0, np.minimum(longest - gains, gives - 1), endpoint=True)
    gains += moved.astype(np.int32)
    gives -= moved.astype(np.int32)
    return lengths


def warm_up(runner: Runner, timeout: float = 0.0) -> None:
    """Run prompts and tokens of a decoder, so that its first request is fast.

    Args:
        timeout: longest time of a step on a GPU, in seconds, beside the time to compile; 0 is no limit.

    Raises:
        ConfigError: the logits of random tokens hold NaN.
        ModelFaultError: the GPU does not end a step.
    """
    limit = timeout if runner.device.type == "cuda" else 0.0
    lengths = sorted({1, min(2, runner.arenas[0].max_tokens)}, reverse=True)
    rows = runner.arenas[0].largest["logit_rows"]
    for options in _options(has_sources=runner.info.has_sources, rows=rows):
        for length in lengths:
            chunk = _choosing(_chunk(runner, length, 1, options))
            _run(runner, [chunk], limit)
        for beams in _beams_after(runner, chunk):
            _run(runner, [beams], limit)
    if runner.device.type == "cuda":
        warm_up_kernels(runner, limit)
    # everything is compiled
    call_within(limit, partial(_check_logits, runner))


def warm_up_draws(runner: Runner) -> None:
    """Run steps that draw their tokens, and one of a search.

    A process of the model does it.
    """
    limits = [(_DRAWN.temperature, _DRAWN.top_k, _DRAWN.top_p, _DRAWN.min_p)]
    rows = runner.arenas[0].largest["logit_rows"]
    beams = _searched(rows)[0].num_beams
    rules = SearchRules(beams, True, False, None, (), np.zeros(1, np.int32), 1.0, 1.0)
    plans = {True: [DevicePlan(searches=[rules])]}
    draws = [Draws(limits, None), Draws(limits, np.zeros(1)), Draws(limits, None, _edits())]
    plans[False] = [DevicePlan(each) for each in draws]
    for options in _options(has_sources=runner.info.has_sources, rows=rows):
        prompt = _choosing(_chunk(runner, 1, 1, options))
        for plan in plans[prompt.sequence.is_searched]:
            for chunk in (prompt, *_beams_after(runner, prompt)):
                runner.decoder.run_packed(pack_step(_step([chunk]), runner.info.block_size, plan))


def warm_up_chooser(chooser: Chooser, info: ModelInfo) -> None:
    """Choose tokens with options of each kind, on a CPU, without the model.

    Where the model runs in a process of its own, that process has warmed it up.
    """
    for options in _options(has_sources=info.has_sources, rows=info.max_logit_rows):
        if options == _searched(info.max_logit_rows)[0]:
            # that process takes its steps
            continue
        sequence = _sequence(1, 1, options, has_sources=info.has_sources)
        step = _step([_choosing(Chunk(sequence, 0, (0,), _BLOCK, ()))])
        # what the process chooses otherwise
        nothing = DevicePlan(searches=[None])
        with torch.inference_mode():
            chooser.outputs(step, nothing, Chosen(), torch.zeros(1, info.vocab_size))


def warm_up_kernels(runner: Runner, timeout: float = 0.0) -> None:
    """Run steps of prompts of all forms: a fault or a compile comes at load."""
    largest = runner.arenas[0].largest
    max_tokens, max_sequences = largest["tokens"], largest["logit_rows"]
    length = 2
    while length <= min(runner.info.max_sequence_tokens, max_tokens):
        _run(runner, [_chunk(runner, length, length)], timeout)
        if 2 * length <= max_tokens and max_sequences > 1:
            _run(runner, [_chunk(runner, length, length)] * 2, timeout)
        length *= 2
    count = min(max_sequences, max_tokens - 1)
    if count > 1 and runner.info.max_sequence_tokens > 1:
        _run(runner, [_chunk(runner, 2, 1), *[_chunk(runner, 1, 1)] * (count - 1)], timeout)


def _check_logits(runner: Runner) -> None:
    """Run random tokens in the largest step that only decodes.

    Raises:
        ConfigError: the logits hold NaN.
    """
    count = runner.arenas[0].largest["logit_rows"]
    chunk = _chunk(runner, 1, 1)
    # its source is encoded
    like = chunk._replace(samples=(chunk.sequence,), encodes=())
    token_ids = np.random.default_rng(0).integers(0, runner.info.vocab_size, count).tolist()
    chunks = [
        like._replace(token_ids=(token_id,), block_ids=array("i", [index % runner.info.num_blocks]))
        for index, token_id in enumerate(token_ids)
    ]
    if runner.decoder.has_nan(chunks):
        raise ConfigError(
            f"random tokens of {count} sequences have logits with NaN in {runner.info.dtype}: set dtype to bf16 or fp32"
        )


def _run(runner: Runner, chunks: Sequence[Chunk], timeout: float) -> None:
    run = partial(runner.run_batch, _step(chunks))
    call_within(timeout, run, compile_seconds=_COMPILE_SECONDS)


def _step(chunks: Sequence[Chunk]) -> Batch:
    sequences = tuple(chunk.sequence for chunk in chunks)
    shape = BatchShape.of([len(chunk.token_ids) for chunk in chunks])
    return Batch(sequences, shape, 0.0, "warm-up", tuple(chunks), ((0, 0),))


def _chunk(runner: Runner, length: int, source: int, options: GenerationOptions = _GREEDY) -> Chunk:
    sequence = _sequence(length, source, options, has_sources=runner.info.has_sources)
    count, of_source = (-(-each // runner.info.block_size) for each in (length, source))
    if not runner.info.has_sources:
        return Chunk(sequence, 0, (0,) * length, _BLOCK * count, ())
    return Chunk(sequence, 0, (0,) * length, _BLOCK * count, (), (0,) * of_source, (0,) * source)


def _choosing(chunk: Chunk) -> Chunk:
    sequence = chunk.sequence
    slots = tuple(range(sequence.generation.num_beams)) if sequence.is_searched else ()
    return chunk._replace(samples=(sequence,), beam_slots=slots)


def _beams_after(runner: Runner, prompt: Chunk) -> list[Chunk]:
    """Return the tokens of beams after a prompt, all in block 0; none without beams."""
    length, beams = len(prompt.token_ids), len(prompt.beam_slots)
    if not beams or length == runner.info.max_sequence_tokens:
        return []
    blocks = _BLOCK * -(-(length + 1) // runner.info.block_size)
    chunk = prompt._replace(
        start=length, token_ids=(0,) * beams, block_ids=blocks * beams, encodes=(), beams=beams
    )
    return [chunk]


def _options(*, has_sources: bool, rows: int) -> tuple[GenerationOptions, ...]:
    """Return options of each kind of choice of a model, given its rows of logits."""
    if has_sources:
        return _searched(rows)
    sampled = _GREEDY, _DRAWN, _EDITED, _REPORTED
    return sampled if rows == 1 else (*sampled, *_searched(rows))


def _searched(rows: int) -> tuple[GenerationOptions, GenerationOptions]:
    """Return options of searches: one of the device, and one of the host."""
    plain = GenerationOptions(num_beams=min(2, rows))
    return plain, replace(plain, repetition_penalty=2.0)


def _edits() -> Edits:
    """Return the edits of one row, whose list begins and has no slot."""
    ids = np.zeros(1, np.int32)
    rows = np.array([[0, NO_SLOT, 0, 0, 0, 1]], np.int32)
    return Edits(rows, np.ones((1, 3), np.float32), ids, ids, np.zeros(1, np.float32))


def _sequence(
    length: int, source: int, options: GenerationOptions, *, has_sources: bool
) -> GeneratedSequence:
    """Return a sequence with a prompt of zeros, and a source text if needed."""
    text = Source(np.zeros(source, dtype=np.int32) if has_sources else None)
    prompt = Prompt(np.zeros(length, dtype=np.int32), payload=text)
    request = Request((prompt,), RequestOptions(generation=options))
    (sequence,) = unanswered_sequences(request)
    assert isinstance(sequence, GeneratedSequence)
    return sequence

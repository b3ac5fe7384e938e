"""What is profiled: batches of an encoder, and steps of a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch

from varlen.config import EngineConfig
from varlen.costs.batch_shape import BatchShape
from varlen.decoding.sampling import Sampler
from varlen.decoding.structured import Grammars
from varlen.errors import ConfigError
from varlen.execution.runner import Runner
from varlen.execution.step_runner import StepRunner
from varlen.generation_options import GenerationOptions
from varlen.models.checkpoint import Checkpoint
from varlen.request import DEFAULT_OPTIONS, Prompt, Reply, Request, RequestOptions
from varlen.sequence import Chunk, GeneratedSequence, RequestState, StepBatch
from varlen.tokenization import Tokenizer
from varlen_kernels import reference
from varlen_kernels.dispatch import decoder_kernels_for
from varlen_tools.profile_ops.timed import Breakdown, TimedKernels, measure

_CPU = torch.device("cpu")


def random_batches(
    lengths: Sequence[int], max_batch_tokens: int, vocab_size: int, seed: int = 0
) -> list[list[Prompt]]:
    """Return batches of random sequences, sorted by length, within `max_batch_tokens`."""
    numbers = np.random.default_rng(seed)
    batches: list[list[Prompt]] = [[]]
    room = max_batch_tokens
    for length in sorted(lengths):
        if length > room:
            batches.append([])
            room = max_batch_tokens
        ids = numbers.integers(0, vocab_size, length, dtype=np.int32)
        batches[-1].append(Prompt(ids))
        room -= length
    return batches


def profile_batches(
    checkpoint: Checkpoint, config: EngineConfig, lengths: Sequence[int], rounds: int
) -> Breakdown:
    """Return where the time of an encoder's batches goes.

    Args:
        checkpoint: of the encoder.
        config: the settings; the device is a CPU.
        lengths: of the sequences, in tokens.
        rounds: measured runs of every batch.

    Raises:
        CheckpointError: the checkpoint is incomplete.
        ConfigError: a setting does not fit the checkpoint.
    """
    timed = TimedKernels(reference)
    runner = Runner(checkpoint, config, kernels=timed)
    batches = random_batches(lengths, runner.max_batch_tokens, runner.vocab_size)
    title = f"encode, {len(lengths)} sequences"
    runs = [partial(runner.run, batch, [DEFAULT_OPTIONS] * len(batch)) for batch in batches]
    try:
        return measure(title, runs, timed, tokens=sum(lengths), rounds=rounds)
    finally:
        runner.close()


def profile_steps(
    checkpoint: Checkpoint,
    config: EngineConfig,
    running: Sequence[int],
    context: int,
    rounds: int,
) -> list[Breakdown]:
    """Return where the time of a decoder's steps goes: each prefill, then its decode.

    Args:
        checkpoint: of the decoder.
        config: the settings; the device is a CPU.
        running: numbers of sequences in a step.
        context: length of their prompts, in tokens; the decode step adds the token after them.
        rounds: measured runs of every step.

    Raises:
        CheckpointError: the checkpoint is incomplete.
        ConfigError: a setting does not fit the checkpoint, or the sequences do not fit `kv_bytes`.
    """
    most = max(running)
    config = replace(
        config,
        max_running_sequences=max(most, config.max_running_sequences),
        max_step_tokens=max(most * context, config.max_step_tokens),
    )
    timed = TimedKernels(decoder_kernels_for(_CPU))
    tokenizer = Tokenizer(checkpoint.folder, checkpoint.max_sequence_tokens)
    vocab_size, ends = checkpoint.vocab_size, checkpoint.eos_token_ids
    sampler = Sampler(vocab_size, ends, Grammars(tokenizer.huggingface, vocab_size, ends), _CPU)
    runner = StepRunner(checkpoint, config, timed.timed("sample", sampler.sample), kernels=timed)
    try:
        if context >= runner.max_sequence_tokens:
            raise ConfigError(
                f"a context of {context} tokens leaves no room for an answer; this model takes"
                f" {runner.max_sequence_tokens} tokens"
            )
        blocks = -(-(context + 1) // runner.kv.block_size)
        if blocks * most > runner.kv.num_blocks:
            raise ConfigError(
                f"kv_bytes allows {runner.kv.num_blocks} blocks; {most} sequences of {context + 1} tokens need"
                f" {blocks * most}"
            )
        breakdowns = []
        for count in running:
            sequences = _random_sequences(count, context, runner.vocab_size)
            for phase, start in (("prefill", 0), ("decode", context)):
                step = _step(sequences, start, blocks)
                title = f"{phase}, {count} x {context} tokens"
                if phase == "decode":
                    title = f"decode, {count} at {context} tokens"
                breakdowns.append(
                    measure(
                        title,
                        [partial(runner.run_batch, step)],
                        timed,
                        tokens=step.shape.tokens,
                        rounds=rounds,
                    )
                )
        return breakdowns
    finally:
        runner.close()


def _random_sequences(count: int, length: int, vocab_size: int) -> list[GeneratedSequence]:
    """Return sequences with random prompts, which are sampled with the default options."""
    numbers = np.random.default_rng(0)
    prompts = tuple(
        Prompt(numbers.integers(0, vocab_size, length, dtype=np.int32)) for _ in range(count)
    )
    request = Request(prompts, RequestOptions(generation=GenerationOptions(seed=0)))
    # never answered
    state = RequestState(request, cast(Reply, None), 0.0)
    return [each for each in state.sequences if isinstance(each, GeneratedSequence)]


def _step(sequences: Sequence[GeneratedSequence], start: int, blocks: int) -> StepBatch:
    """Return a step of the whole prompts from 0, or of one token after them."""
    chunks = tuple(
        Chunk(
            sequence,
            start,
            (0,) if start else tuple(sequence.token_ids),
            tuple(range(number * blocks, (number + 1) * blocks)),
            (sequence,),
        )
        for number, sequence in enumerate(sequences)
    )
    shape = BatchShape.of([len(chunk.token_ids) for chunk in chunks])
    return StepBatch(tuple(sequences), shape, 0.0, "profile", chunks)

"""What is profiled: batches of an encoder, and steps of generation."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from varlen.config import EngineConfig
from varlen.costs.model import BatchShape
from varlen.decoding.checkpoint_rules import search_rules
from varlen.decoding.chooser import TokenChooser
from varlen.decoding.grammar.grammars import Grammars
from varlen.decoding.token_edits import BadWords
from varlen.errors import ConfigError
from varlen.execution.model_info import edit_limits
from varlen.execution.runner import Runner
from varlen.intake.tokenization import Tokenizer
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.generation import GenerationOptions
from varlen.request.request import (
    DEFAULT_OPTIONS,
    Int32Array,
    Prompt,
    Request,
    RequestOptions,
    Source,
)
from varlen.scheduling.batch import Batch, Chunk, GeneratedSequence, unanswered_sequences
from varlen.service.service import generation_sandbox
from varlen_bench.profile_ops.timed import Breakdown, TimedKernels, measure
from varlen_kernels.ops import kernels_for

_CPU = torch.device("cpu")


def random_batches(
    lengths: Sequence[int], max_batch_tokens: int, vocab_size: int
) -> list[list[Prompt]]:
    """Return batches of random sequences, sorted by length, within `max_batch_tokens`."""
    numbers = np.random.default_rng(0)
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
        config: the settings; the device is a CPU.
        lengths: lengths of the sequences, in tokens.

    Raises:
        ConfigError: a setting does not fit the checkpoint.
    """
    timed = TimedKernels(kernels_for(_CPU))
    runner = Runner(checkpoint, config, kernels=timed)
    batches = random_batches(lengths, runner.info.max_batch_tokens, runner.info.vocab_size)
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
    *,
    context: int,
    beams: int = 1,
    rounds: int,
) -> list[Breakdown]:
    """Return where time goes in the first step and a decode step of `running` sequences.

    The first step is the prefill of a decoder, or the encoding of sources with one target token each.

    Args:
        checkpoint: decoder, or encoder with its decoder.
        config: the settings; the device is a CPU.
        running: numbers of sequences in a step.
        context: length of prompts, and of sources, in tokens; a decode step adds the token after them.
        beams: number of beams of each sequence; 1 samples, or searches with one beam if there are sources.

    Raises:
        ConfigError: a setting does not fit the checkpoint, or the sequences do not fit `kv_bytes`.
    """
    most = max(running)
    rows = max(most * beams, config.max_running_sequences)
    # sources run beside a token of each running sequence
    tokens = max(most * (context + 1) + rows, config.max_step_tokens)
    config = replace(config, max_running_sequences=rows, max_step_tokens=tokens)
    timed = TimedKernels(kernels_for(_CPU))
    choice = _TimedChooser(_token_chooser(checkpoint, config), timed)
    runner = Runner(checkpoint, config, choice, kernels=timed)
    workload = _Workload(context, beams, runner.info.block_size, checkpoint.translate is not None)
    _check_fits(runner, workload, most)
    breakdowns = []
    for count in running:
        sequences = workload.sequences(count, checkpoint.vocab_size)
        # the decode step reads the keys and values of this one, and goes on with its searches
        runner.run_batch(workload.prompt_step(sequences))
        chosen = [sequence.sampler_state for sequence in sequences]
        first, decode = workload.first_step(sequences), workload.decode_step(sequences)
        name = f"{count} at {context} tokens" + (f", {beams} beams" if beams > 1 else "")
        for title, step, states in (
            (f"{first.reason}, {count} x {context} tokens", first, [None] * count),
            (f"{decode.reason}, {name}", decode, chosen),
        ):
            breakdown = measure(
                title,
                [partial(runner.run_batch, step)],
                timed,
                tokens=step.shape.tokens,
                rounds=rounds,
                prepare=partial(_set_states, sequences, states),
            )
            breakdowns.append(breakdown)
    runner.close()
    return breakdowns


def _check_fits(runner: Runner, workload: _Workload, most: int) -> None:
    """Raise ConfigError unless `most` sequences and an answer fit the model and its blocks."""
    context = workload.context
    if context >= runner.info.max_sequence_tokens:
        raise ConfigError(
            f"a context of {context} tokens leaves no room for an answer; this model takes"
            f" {runner.info.max_sequence_tokens} tokens"
        )
    needed = most * workload.blocks_per_sequence
    if needed > runner.info.num_blocks:
        raise ConfigError(
            f"kv_bytes allows {runner.info.num_blocks} blocks; {most} sequences at {context} tokens need {needed}"
        )


def _token_chooser(checkpoint: Checkpoint, config: EngineConfig) -> TokenChooser:
    """Return the choice of tokens of a checkpoint that generates or translates."""
    tokenizer = Tokenizer(checkpoint.folder, checkpoint.max_sequence_tokens)
    ends = search_rules(checkpoint).end_ids
    sandbox, _ = generation_sandbox(checkpoint, config, tokenizer.huggingface, ends)
    vocab_size = checkpoint.target_vocab_size
    grammars = Grammars(sandbox, vocab_size, max_bytes=config.grammar_cache_bytes)
    bad_words = BadWords(tokenizer.huggingface, vocab_size, ends)
    limits = edit_limits(checkpoint, config)
    return TokenChooser(checkpoint, grammars, bad_words, _CPU, limits)


class _TimedChooser:
    """A `Chooser` whose part on the host is timed as an op."""

    def __init__(self, chooser: TokenChooser, timed: TimedKernels) -> None:
        self.plan = chooser.plan
        self.given = chooser.given
        self.forget = chooser.forget
        self.outputs = timed.timed("choose", chooser.outputs)


def _set_states(sequences: Sequence[GeneratedSequence], states: Sequence[object]) -> None:
    """Let each sequence go on from a copy of a state; None starts it."""
    for sequence, state in zip(sequences, states, strict=True):
        sequence.sampler_state = deepcopy(state)


@dataclass(frozen=True, slots=True)
class _Workload:
    """Steps of sequences of one length, each with blocks of its own.

    Attributes:
        context: length of prompts, and of sources, in tokens.
        beams: beams of a sequence in a decode step; they read and write the same blocks.
        block_size: tokens of a block.
        has_sources: whether the sequences translate a source.
    """

    context: int
    beams: int
    block_size: int
    has_sources: bool

    @property
    def target_blocks(self) -> int:
        """Blocks of a prompt and the token after it."""
        return -(-(self.context + 1) // self.block_size)

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks of a sequence and its source."""
        source_blocks = -(-self.context // self.block_size) if self.has_sources else 0
        return self.target_blocks + source_blocks

    def sequences(self, count: int, vocab_size: int) -> list[GeneratedSequence]:
        """Return sequences with random prompts; options other than beams are the default ones."""
        numbers = np.random.default_rng(0)

        def draw() -> Int32Array:
            return numbers.integers(0, vocab_size, self.context, dtype=np.int32)

        prompts = tuple(
            Prompt(draw(), payload=Source(draw() if self.has_sources else None))
            for _ in range(count)
        )
        request = Request(
            prompts, RequestOptions(generation=GenerationOptions(num_beams=self.beams))
        )
        return [
            each for each in unanswered_sequences(request) if isinstance(each, GeneratedSequence)
        ]

    def first_step(self, sequences: Sequence[GeneratedSequence]) -> Batch:
        """Return the step in which the sequences start."""
        if not self.has_sources:
            return self.prompt_step(sequences)
        return self._step("encode", sequences, slice(1), encodes=True)

    def prompt_step(self, sequences: Sequence[GeneratedSequence]) -> Batch:
        """Return the step of whole prompts."""
        return self._step("prefill", sequences, slice(self.context), encodes=self.has_sources)

    def decode_step(self, sequences: Sequence[GeneratedSequence]) -> Batch:
        """Return the step of the token after each prompt, or of the beams after it."""
        step = self._step("decode", sequences, slice(self.context, None), encodes=False)
        if not sequences[0].is_searched:
            return step
        chunks = tuple(
            each._replace(
                token_ids=each.token_ids * self.beams,
                block_ids=each.block_ids * self.beams,
                beams=self.beams,
            )
            for each in step.chunks
        )
        shape = BatchShape.of([1] * self.beams * len(chunks))
        return replace(step, chunks=chunks, shape=shape)

    def _places(self, sequence: GeneratedSequence) -> tuple[int, ...]:
        """Return the places of the beams of a sequence, none if it is sampled."""
        first = sequence.row * self.beams
        return tuple(range(first, first + self.beams)) if sequence.is_searched else ()

    def _step(
        self, name: str, sequences: Sequence[GeneratedSequence], part: slice, *, encodes: bool
    ) -> Batch:
        """Return a step of a part of each prompt with one more token."""
        chunks = []
        for sequence in sequences:
            begin = sequence.row * self.blocks_per_sequence
            blocks = range(begin, begin + self.blocks_per_sequence)
            source = sequence.prompt.payload_tokens(Source)
            chunks.append(
                Chunk(
                    sequence,
                    part.start or 0,
                    (*sequence.token_ids, 0)[part],
                    array("i", blocks[: self.target_blocks]),
                    (sequence,),
                    source_block_ids=tuple(blocks[self.target_blocks :]),
                    encodes=tuple(source.tolist()) if encodes and source is not None else (),
                    beam_slots=self._places(sequence),
                )
            )
        shape = BatchShape.of([len(chunk.token_ids) + len(chunk.encodes) for chunk in chunks])
        return Batch(tuple(sequences), shape, 0.0, name, tuple(chunks))

"""Measure what the engine's thread does in a decode step, without a model: `python -m varlen_bench.host_steps`.

Every sequence streams its answer. A step is scheduled, its random numbers are drawn and it is packed; its tokens are
read, appended, and become text. No device runs it: its tokens are known at once, and two steps are in flight, as on a
GPU. A time is the CPU time of the thread, so other work on the machine counts less; of the steps it is the least, and
the 20th percentile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, product
from types import SimpleNamespace
from typing import Annotated, cast

import numpy as np
import torch
import typer
from tokenizers import Tokenizer, decoders, models

from varlen.config import NO_LIMIT
from varlen.decoding.chooser import TokenChooser
from varlen.decoding.grammar.grammars import Grammars
from varlen.decoding.text.writer import TextWriter, TokenBytes
from varlen.decoding.token_edits import BadWords
from varlen.execution.executor import InlineExecutor, Outputs, StepLauncher
from varlen.execution.packing import PackedStep, pack_step
from varlen.memory.blocks import BlockPool
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.generation import GenerationOptions
from varlen.request.request import Output, Prompt, Request, RequestOptions
from varlen.scheduling.admission import Admission
from varlen.scheduling.batch import MAX_STEPS, Batch, GeneratedSequence
from varlen.scheduling.device_plan import BeamStep, Chosen, DevicePlan, EditLimits, SampledToken
from varlen.scheduling.engine import Engine
from varlen.scheduling.iteration.iteration import IterationScheduler
from varlen.scheduling.iteration.step_size import StepLimits
from varlen.telemetry.metrics import Stats
from varlen_bench.harness.command import Output as OutputFile
from varlen_bench.harness.command import Quick, Run, csv_path
from varlen_bench.harness.rows import Cell, csv_table
from varlen_bench.harness.summary import Spread, rounded

_SEQUENCES = (1, 8, 64)
_CHOICES = {
    "greedy": GenerationOptions(temperature=0.0),
    "sampled": GenerationOptions(temperature=0.8, top_p=0.9, seed=0),
}
_PROMPT_TOKENS, _BLOCK_TOKENS = 64, 16
# A token is a character of ASCII that byte-level tokenizers write as itself.
_FIRST_CHARACTER, _VOCABULARY = 0x21, 94
# Steps before the measured ones: prompts run, and texts of tokens are known.
_FIRST_STEPS = 20
_COLUMNS = ("sequences", "choice", "steps", "us", "us_p20")


class _NoDevice:
    """A `StepDevice` and a `Launcher`, whose steps choose one token after another at once."""

    slots = MAX_STEPS
    wait = None

    def __init__(self, chooser: TokenChooser) -> None:
        self._launcher = StepLauncher[PackedStep](self, chooser)
        self._first = cycle(range(_VOCABULARY))
        self._tokens = [*range(_VOCABULARY)] * (1 + max(_SEQUENCES))

    def launch_batch(self, batch: Batch) -> Callable[[], Outputs]:
        """Launch a step."""
        return self._launcher.launch(batch)

    def check(self) -> None:
        """Do nothing: no step fails."""

    def pack(self, step: Batch, plan: DevicePlan) -> PackedStep:
        """Return a step as arrays."""
        return pack_step(step, _BLOCK_TOKENS, plan)

    def may_queue(self, packed: PackedStep) -> bool:  # noqa: ARG002  # of every device
        """Return True, as a GPU does."""
        return True

    def start(
        self,
        step: Batch,  # noqa: ARG002  # of every device
        packed: PackedStep,
    ) -> Callable[[], Chosen]:
        """Return a function that returns the tokens of a step."""
        first, rows = next(self._first), len(packed.inputs["logit_rows"])
        chosen = Chosen(self._tokens[first : first + rows])
        return lambda: chosen

    def choose(
        self, step: Batch, packed: PackedStep, plan: DevicePlan, chosen: Chosen
    ) -> Sequence[SampledToken | BeamStep]:
        """Raise: the device chooses every token."""
        raise NotImplementedError


@dataclass(slots=True)
class _CountingReply:
    """Counts the tokens of an answer."""

    tokens: int = 0

    def is_cancelled(self) -> bool:
        """Return False: every client waits."""
        return False

    def send(self, row: int, output: Output) -> None:  # noqa: ARG002  # only tokens count
        """Count a part."""
        self.tokens += 1

    def finish(self) -> None:
        """Do nothing: the last part was sent."""

    def fail(self, error: Exception) -> None:
        """Raise the error."""
        raise error


def step_seconds(num_sequences: int, options: GenerationOptions) -> list[float]:
    """Return the CPU seconds of each decode step of some sequences, after the first steps.

    Raises:
        RuntimeError: a token was not sent.
    """
    tokenizer = Tokenizer(
        models.BPE({chr(_FIRST_CHARACTER + i): i for i in range(_VOCABULARY)}, [])
    )
    tokenizer.decoder = decoders.ByteLevel()
    chooser = TokenChooser(
        # all that is read of it: no checkpoint, and no request has a grammar
        cast(
            "Checkpoint",
            SimpleNamespace(target_vocab_size=_VOCABULARY, translate=None, eos_token_ids=()),
        ),
        cast(Grammars, None),
        BadWords(tokenizer, _VOCABULARY, ()),
        torch.device("cpu"),
        EditLimits(num_sequences, _VOCABULARY),
    )
    length = _PROMPT_TOKENS + options.max_tokens
    limits = StepLimits(
        max_step_tokens=num_sequences * _PROMPT_TOKENS,
        inter_token_latency_seconds=1.0,
        max_running_sequences=num_sequences,
        max_sequence_tokens=length,
        short_slots=0,
        short_tokens=0,
    )
    pool = BlockPool(num_sequences * -(-length // _BLOCK_TOKENS), _BLOCK_TOKENS)
    admission = Admission(NO_LIMIT, NO_LIMIT)
    scheduler = IterationScheduler(limits, pool, "reserve", admission)
    token_bytes = TokenBytes(tokenizer)

    def new_writer(sequence: GeneratedSequence) -> TextWriter:
        return TextWriter(
            tokenizer,
            sequence.generation,
            prompt_ids=sequence.prompt.token_ids.tolist(),
            eos_ids=(),
            token_bytes=token_bytes,
        )

    executor = InlineExecutor(_NoDevice(chooser), _stopped_clock)
    engine = Engine(scheduler, executor, Stats(), _stopped_clock, new_writer)
    replies = [_CountingReply() for _ in range(num_sequences)]
    numbers = np.random.default_rng(0)
    for reply in replies:
        prompt = Prompt(numbers.integers(0, _VOCABULARY, _PROMPT_TOKENS, dtype=np.int32))
        engine.submit(Request((prompt,), RequestOptions(generation=options, streams=True)), reply)
    engine.step()
    seconds: list[float] = []
    is_running = True
    while is_running:
        began = time.thread_time()
        # the first step in flight ends, and a third one is launched
        is_running = executor.collect(None)
        engine.step()
        seconds.append(time.thread_time() - began)
    if any(reply.tokens != options.max_tokens for reply in replies):
        raise RuntimeError("a token was not sent")
    # the last steps end answers
    return seconds[_FIRST_STEPS : options.max_tokens - MAX_STEPS]


def _stopped_clock() -> float:
    """Return 0 seconds: no step is expected to take long, so each starts at once."""
    return 0.0


def main(
    context: typer.Context,
    quick: Quick = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each case.")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of a round.")] = 300,
    output: OutputFile = None,
) -> None:
    """Measure what the engine's thread does in a decode step, without a model."""
    torch.set_num_threads(1)
    run = Run(
        context,
        "varlen_bench.host_steps",
        threads=1,
        packages=("numpy", "torch", "varlen"),
        output=csv_path("host_steps", output, is_trial=quick),
    )
    rows: list[dict[str, Cell]] = []
    with run.progress() as report:
        for (choice, options), num_sequences in product(_CHOICES.items(), _SEQUENCES):
            generation = replace(options, max_tokens=_FIRST_STEPS + steps + MAX_STEPS)
            measured = [
                each
                for _ in range(1 if quick else rounds)
                for each in step_seconds(num_sequences, generation)
            ]
            row: dict[str, Cell] = {
                "sequences": num_sequences,
                "choice": choice,
                "steps": len(measured),
                "us": rounded(1e6 * min(measured)),
                "us_p20": rounded(1e6 * Spread.of(measured).p20),
            }
            report(f"{num_sequences} sequences, {choice}: {row['us']} us")
            run.append([row])
            rows.append(row)
    run.show(csv_table("The engine's thread in a decode step", _COLUMNS, rows))
    slowest = {row["choice"]: row["us"] for row in rows if row["sequences"] == max(_SEQUENCES)}
    run.finish("host_steps", {f"{choice}_us": us for choice, us in slowest.items()})


if __name__ == "__main__":
    typer.run(main)

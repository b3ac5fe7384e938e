"""One loaded model that generates: checkpoint, input checks, scheduler and engine."""

import logging
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from varlen.config import EngineConfig
from varlen.decoding.chat import ChatTemplate
from varlen.decoding.checkpoint_rules import search_defaults, search_rules
from varlen.decoding.choice import TokenChoice
from varlen.decoding.structured import Grammars
from varlen.decoding.writer import TextWriter
from varlen.errors import RequestError
from varlen.execution.cuda.timeout import with_timeout
from varlen.execution.device import choose_device, name_of, usable_cores
from varlen.execution.executor import ModelExecutor, ThreadExecutor
from varlen.execution.step_runner import StepRunner
from varlen.execution.warm_up import warm_up
from varlen.intake.checks import InputLimits, Intake
from varlen.intake.tokenization import Tokenizer
from varlen.memory.blocks import BlockPool
from varlen.memory.memory_use import MemoryUse
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.draft import Draft, Step
from varlen.request.generation import GenerationOptions, check_search
from varlen.request.request import Prompt, Reply, Request
from varlen.scheduling.admission import Admission
from varlen.scheduling.engine import Engine
from varlen.scheduling.iteration import IterationScheduler
from varlen.scheduling.sequence import GeneratedSequence, OutputWriter
from varlen.scheduling.step_limits import StepLimits
from varlen.service.running import MEGABYTE, RunningModel
from varlen.tasks import Task
from varlen.telemetry.metrics import MetricsSnapshot, SnapshotMetric, Stats
from varlen_kernels.cpu.compiled_ops import compiling

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GenerationService(RunningModel):
    """A running model that generates.

    Attributes:
        grammars: compiler for grammars of structured outputs.
        defaults: options of requests by name, where the checkpoint has its own.
        scheduler: forms steps.
        runner: the model that the executor runs.
    """

    grammars: Grammars
    defaults: Mapping[str, object]
    scheduler: IterationScheduler
    runner: StepRunner

    @classmethod
    def load(
        cls, folder: str | Path, config: EngineConfig, stats: Stats, *, gpu: int = 0
    ) -> "GenerationService":
        """Return the model of a checkpoint folder, warmed up; see `Service.load`."""
        began = time.monotonic()
        torch.set_num_threads(config.threads or usable_cores())
        checkpoint = Checkpoint.open(folder, ignore_config_fields=config.ignored_fields)
        tokenizer = Tokenizer(checkpoint.folder, checkpoint.max_sequence_tokens)
        ends = search_rules(checkpoint).end_ids
        grammars = Grammars(tokenizer.huggingface, checkpoint.target_vocab_size, ends)
        choice = TokenChoice(checkpoint, grammars, choose_device(config.device, gpu))
        runner = StepRunner(checkpoint, config, choice.choose, gpu=gpu)
        with compiling() if runner.device.type == "cpu" else nullcontext():
            warm_up(runner)
        intake = _new_intake(
            checkpoint,
            tokenizer,
            max_sequence_tokens=runner.max_sequence_tokens,
            max_text_bytes=config.max_text_bytes,
        )
        executor: ModelExecutor = ThreadExecutor([runner])
        if runner.device.type == "cuda":
            executor = with_timeout(executor, config.device_timeout_seconds)
        admission = Admission(
            config.max_queued_requests, config.max_queued_tokens, slots=executor.slots
        )

        def new_writer(sequence: GeneratedSequence) -> OutputWriter:
            return TextWriter(
                tokenizer.huggingface,
                sequence.generation,
                prompt_ids=sequence.prompt.token_ids.tolist(),
                eos_ids=ends,
            )

        scheduler = _new_scheduler(config, runner, admission)
        engine = Engine(scheduler, executor, stats, new_writer=new_writer)
        engine.start()
        _log_loaded(checkpoint, config, runner, seconds=time.monotonic() - began)
        defaults = search_defaults(checkpoint, runner.max_sequence_tokens)
        parts = checkpoint, intake, admission, engine, executor
        model = cls(*parts, grammars, defaults, scheduler, runner)
        model.log_notes(runner.max_sequence_tokens)
        return model

    @property
    def task(self) -> Task:
        """The task of the model."""
        return _task_of(self.checkpoint)

    def options(self, parameters: Mapping[str, object]) -> GenerationOptions:
        """Return the checked options of a request, given by name.

        Raises:
            RequestError: see `GenerationOptions.from_parameters`; or a forced token is none of the model.
        """
        options = GenerationOptions.from_parameters(parameters, self.defaults)
        vocab_size = self.checkpoint.target_vocab_size
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            token_id = getattr(options, name)
            if token_id is not None and token_id >= vocab_size:
                raise RequestError(
                    f"{name} is {token_id}; this model generates 0 to {vocab_size - 1}"
                )
        if self.checkpoint.translate is not None:
            check_search(options)
        return options

    def with_grammar(self, draft: Draft) -> Draft:
        """Return a draft with a step that compiles its grammar, if it has one."""
        grammar = draft.options.generation.grammar if draft.options.generation else None
        return draft if grammar is None else draft.and_then(self._grammar_step(grammar))

    def submit(self, request: Request, reply: Reply) -> None:
        """Answer a request, now or later; see `RunningModel.submit`."""
        options = request.options.generation
        assert options is not None
        if options.grammar is not None:
            self.grammars.check(options.grammar)
        self.engine.submit(request, reply)

    def _grammar_step(self, grammar: str) -> Step:
        def compile_grammar() -> tuple[Prompt, ...]:
            self.grammars.check(grammar)
            return ()

        return Step(len(grammar), compile_grammar)

    def snapshot(self) -> MetricsSnapshot:
        """Return the values of the gauges and totals of generation. From any thread."""
        arenas = self.runner.arenas
        counts = self.scheduler.snapshot()
        return {
            **self.queue_metrics(),
            SnapshotMetric.WEIGHT_BYTES: self.runner.weight_bytes,
            SnapshotMetric.ARENA_CAPACITY: sum(arena.capacity for arena in arenas),
            **MemoryUse.total(arena.use() for arena in arenas).metrics(),
            **self.runner.graph_use.metrics(),
            SnapshotMetric.RUNNING_SEQUENCES: counts.running,
            SnapshotMetric.WAITING_SEQUENCES: counts.waiting,
            SnapshotMetric.KV_BLOCKS_USED: counts.blocks.used,
            SnapshotMetric.KV_BLOCKS_RESERVED: counts.blocks.used + counts.blocks.reserved,
            SnapshotMetric.KV_BLOCKS_CAPACITY: counts.blocks.total,
            SnapshotMetric.PREFILL_TOKENS: counts.prefill_tokens,
            SnapshotMetric.DECODE_TOKENS: counts.decode_tokens,
            SnapshotMetric.PREEMPTIONS: counts.preemptions,
            SnapshotMetric.PREFIX_CACHE_HIT_TOKENS: counts.blocks.prefix_hit_tokens,
        }

    def release(self) -> None:
        """Release the weights and the KV caches."""
        self.runner.close()


def _task_of(checkpoint: Checkpoint) -> Task:
    return "generate" if checkpoint.translate is None else "translate"


def _new_intake(
    checkpoint: Checkpoint, tokenizer: Tokenizer, *, max_sequence_tokens: int, max_text_bytes: int
) -> Intake:
    """Return the checks of prompts, with the chat template if there is one."""
    limits = InputLimits(
        max_sequence_tokens=max_sequence_tokens,
        max_text_bytes=max_text_bytes,
        vocab_size=checkpoint.vocab_size,
        type_vocab_size=1,
    )
    template = None
    if checkpoint.chat_template is not None:
        template = ChatTemplate(
            checkpoint.chat_template, checkpoint.special_tokens, max_characters=max_text_bytes
        )
    translate = checkpoint.translate
    start = None if translate is None else translate.tokens.start
    return Intake(tokenizer, limits, template, target_start=start, can_truncate=False)


def _new_scheduler(
    config: EngineConfig, runner: StepRunner, admission: Admission
) -> IterationScheduler:
    limits = StepLimits(
        max_step_tokens=runner.max_step_tokens,
        max_running_sequences=config.max_running_sequences,
        max_sequence_tokens=runner.max_sequence_tokens,
    )
    kv = runner.kv
    blocks = BlockPool(kv.num_blocks, kv.block_size, prefix_cache=config.prefix_cache)
    return IterationScheduler(limits, blocks, config.kv_policy, admission)


def _log_loaded(
    checkpoint: Checkpoint, config: EngineConfig, runner: StepRunner, *, seconds: float
) -> None:
    _log.info(
        "serving %s in %s on %s, sequences up to %d tokens, %d at a time, steps up to %d tokens;"
        " %d KV blocks of %d tokens, %.1f MB; weights %.1f MB; loaded in %.1f s",
        _task_of(checkpoint),
        str(runner.dtype).removeprefix("torch."),
        name_of(runner.device),
        runner.max_sequence_tokens,
        config.max_running_sequences,
        runner.max_step_tokens,
        runner.kv.num_blocks,
        runner.kv.block_size,
        runner.kv.num_blocks * runner.kv.block_bytes / MEGABYTE,
        runner.weight_bytes / MEGABYTE,
        seconds,
    )

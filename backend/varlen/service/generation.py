"""A model that generates: runner, input checks, scheduler, engine and grammars."""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from varlen.config import SHORT_TOKENS, EngineConfig
from varlen.decoding.checkpoint_rules import RequestDefaults, request_defaults, search_rules
from varlen.decoding.chooser import TokenChooser
from varlen.decoding.grammar.grammars import MAX_COMPILING, GrammarHold, Grammars
from varlen.decoding.text.chat import ChatTemplate
from varlen.decoding.text.writer import TextWriter, TokenBytes
from varlen.decoding.token_edits import BadWords
from varlen.errors import CheckpointError, ConfigError, RequestError
from varlen.execution.device import choose_device, usable_cores
from varlen.execution.executor import (
    InlineExecutor,
    ModelExecutor,
    OverlappingExecutor,
    with_timeout,
)
from varlen.execution.model_info import ModelInfo, edit_limits, limit_notes, queue_limit, text_limit
from varlen.execution.workers.steps import StepModel, load_step_model
from varlen.intake.checks import Intake
from varlen.intake.long_texts import InputLimits
from varlen.intake.pool import PoolLimits, TokenizerPool
from varlen.intake.tokenization import Tokenizer
from varlen.memory.blocks import BlockPool
from varlen.memory.memory_use import AdapterUse
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.generation import GenerationOptions, check_search
from varlen.request.request import Draft, Output, Prompt, Reply, Request, TokenizationTask
from varlen.scheduling.admission import Admission
from varlen.scheduling.batch import GeneratedSequence, OutputWriter
from varlen.scheduling.engine import Engine
from varlen.scheduling.iteration.iteration import IterationScheduler
from varlen.scheduling.iteration.speculation import Speculation
from varlen.scheduling.iteration.step_size import StepLimits
from varlen.service.service import MEGABYTE, Service, generation_sandbox, log_notes
from varlen.tasks import Task
from varlen.telemetry.metrics import MetricsSnapshot, SnapshotMetric, Stats

_log = logging.getLogger(__name__)

# Most steps of searches in one launch: more would save less than a fiftieth of a step of a tiny model.
_LAUNCH_STEPS = 16


def submit_with_grammar(
    request: Request,
    reply: Reply,
    hold: GrammarHold,
    queue: TokenizerPool,
    submit: Callable[[Request, Reply], None],
) -> None:
    """Submit a request, now or once its grammar is compiled.

    Args:
        hold: grammar of the request; it is released when the request is answered.

    Raises:
        VarlenError: the request is not admitted; the caller answers it.
    """
    holding = _HoldingReply(reply, hold)
    try:
        if hold.take():
            submit(request, holding)
            return
        arrival = request.arrived(time.monotonic())
        admitted = replace(request, arrival=arrival)
        task = TokenizationTask(hold.num_characters, lambda: (), hold.compile)
        draft = Draft((task,), request.options)
        queue.submit(draft, holding, lambda _: submit(admitted, holding), arrival=arrival)
    except BaseException:
        hold.release()
        raise


class _HoldingReply:
    """The reply of a request that holds its grammar until it is answered."""

    def __init__(self, reply: Reply, hold: GrammarHold) -> None:
        self._reply = reply
        self._hold = hold

    def is_cancelled(self) -> bool:
        return self._reply.is_cancelled()

    def send(self, row: int, output: Output) -> None:
        self._reply.send(row, output)

    def finish(self) -> None:
        self._hold.release()
        self._reply.finish()

    def fail(self, error: Exception) -> None:
        self._hold.release()
        self._reply.fail(error)


@dataclass(frozen=True, slots=True)
class GeneratorParts:
    """A model that generates: a `Kind`.

    Requests whose grammar is not compiled yet wait in the `compile_queue`.
    """

    checkpoint: Checkpoint
    grammars: Grammars
    bad_words: BadWords
    token_bytes: TokenBytes
    defaults: RequestDefaults
    scheduler: IterationScheduler
    runner: StepModel
    engine: Engine
    compile_queue: TokenizerPool

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        config: EngineConfig,
        stats: Stats,
        opened: ExitStack,
        *,
        gpu: int,
        isolated: bool,
    ) -> "Service[GeneratorParts]":
        if config.speculation != "none" and checkpoint.translate is not None:
            raise ConfigError(
                f'speculation is "{config.speculation}" and the task is translate; allowed: none'
            )
        torch.set_num_threads(config.threads or usable_cores())
        tokenizer = Tokenizer(checkpoint.folder, checkpoint.max_sequence_tokens)
        ends = search_rules(checkpoint).end_ids
        if config.speculation == "draft_model":
            _check_draft_model(checkpoint.folder / config.draft_model, tokenizer)
        sandbox, template = generation_sandbox(checkpoint, config, tokenizer.huggingface, ends)
        opened.callback(sandbox.close)
        # it loads while the weights do
        sandbox.start()
        grammars = Grammars(
            sandbox, checkpoint.target_vocab_size, max_bytes=config.grammar_cache_bytes
        )
        bad_words = BadWords(tokenizer.huggingface, checkpoint.target_vocab_size, ends)
        # logits of several processes come through memory of the host
        device = choose_device("cpu" if config.num_processes > 1 else config.device, gpu)
        limits = edit_limits(checkpoint, config)
        chooser = TokenChooser(checkpoint, grammars, bad_words, device, limits)
        runner = load_step_model(checkpoint, config, chooser, stats, gpu=gpu, isolated=isolated)
        opened.callback(runner.close)
        longest = runner.info.max_sequence_tokens
        intake = _new_intake(checkpoint, tokenizer, config, runner.info, template)
        if template is not None:
            template.check()
        defaults = request_defaults(checkpoint, longest, config.generation_config)
        executor: ModelExecutor = InlineExecutor(runner, is_pipeline=config.pipeline_parallel > 1)
        if runner.info.device == "cuda" and config.num_processes == 1:
            # a step that hangs must not stop the engine
            executor = with_timeout(OverlappingExecutor(runner), config.device_timeout_seconds)
        # steps in flight run one after another
        admission = Admission(config.max_queued_requests, queue_limit(config, longest))
        launch_steps = 1 if runner.arrived is None else _LAUNCH_STEPS
        scheduler = _new_scheduler(config, runner.info, admission, launch_steps)
        token_bytes = TokenBytes(tokenizer.huggingface)

        def new_writer(sequence: GeneratedSequence) -> OutputWriter:
            return TextWriter(
                tokenizer.huggingface,
                sequence.generation,
                prompt_ids=sequence.prompt.token_ids.tolist(),
                eos_ids=ends,
                token_bytes=token_bytes,
            )

        engine = Engine(scheduler, executor, stats, new_writer=new_writer, arrived=runner.arrived)
        queue = _new_compile_queue(config, admission, stats)
        model = cls(
            checkpoint,
            grammars,
            bad_words,
            token_bytes,
            defaults,
            scheduler,
            runner,
            engine,
            queue,
        )
        parts = intake, admission, engine, executor, sandbox
        return Service(checkpoint, _task_of(checkpoint), *parts, model, [queue])

    def options(self, parameters: Mapping[str, object]) -> GenerationOptions:
        """Return the checked options of a request, given by name.

        Raises:
            RequestError: see `GenerationOptions.from_parameters`; or a token is none of the model.
        """
        options = self.defaults.read(parameters)
        self._check_tokens(options)
        if self.checkpoint.translate is not None:
            check_search(options)
        return options

    def with_bad_words(self, draft: Draft) -> Draft:
        """Return a draft with a step that tokenizes its bad words, if it has any."""
        options = draft.options.generation
        if options is None or not options.bad_words:
            return draft

        def tokenize() -> tuple[Prompt, ...]:
            self.bad_words.check(options)
            return ()

        return draft.and_then(TokenizationTask(sum(map(len, options.bad_words)), tokenize))

    def submit(self, request: Request, reply: Reply) -> None:
        options = request.options.generation
        assert options is not None
        if request.options.adapter:
            self.runner.info.check_adapter(request.options.adapter)
        self._check_tokens(options)
        if options.bad_words:
            self.bad_words.check(options)
        if options.grammar is None:
            self.engine.submit(request, reply)
            return
        hold = self.grammars.hold(options.grammar)
        submit_with_grammar(request, reply, hold, self.compile_queue, self.engine.submit)

    def _check_tokens(self, options: GenerationOptions) -> None:
        """Raise RequestError if the options name a token that is none of the model."""
        last = self.checkpoint.target_vocab_size - 1
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            token_id = getattr(options, name)
            if token_id is not None and token_id > last:
                raise RequestError(f"{name} is {token_id}; this model generates 0 to {last}")
        for token_id, _ in options.logit_bias:
            if token_id > last:
                raise RequestError(
                    f"logit_bias has the token {token_id}; this model generates 0 to {last}"
                )

    def metrics(self) -> MetricsSnapshot:
        info = self.runner.info
        counts = self.scheduler.snapshot()
        grammars = self.grammars.use()
        return {
            SnapshotMetric.GRAMMARS: grammars.grammars,
            SnapshotMetric.GRAMMAR_BYTES: grammars.held_bytes,
            SnapshotMetric.GRAMMAR_COMPILATIONS: grammars.started,
            SnapshotMetric.GRAMMAR_EVICTIONS: grammars.evictions,
            SnapshotMetric.WEIGHT_BYTES: info.weight_bytes,
            SnapshotMetric.ARENA_CAPACITY: info.arena_bytes,
            **self.runner.use().metrics(),
            **self.runner.graph_use.metrics(),
            SnapshotMetric.RUNNING_SEQUENCES: counts.running,
            SnapshotMetric.WAITING_SEQUENCES: counts.waiting,
            SnapshotMetric.KV_BLOCKS_USED: counts.blocks.used,
            SnapshotMetric.KV_BLOCKS_RESERVED: counts.blocks.used + counts.blocks.reserved,
            SnapshotMetric.KV_BLOCKS_CAPACITY: counts.blocks.total,
            SnapshotMetric.PREFILL_TOKENS: counts.prefill_tokens,
            SnapshotMetric.DECODE_TOKENS: counts.decode_tokens,
            SnapshotMetric.DRAFT_TOKENS: counts.drafted_tokens,
            SnapshotMetric.ACCEPTED_DRAFT_TOKENS: counts.accepted_tokens,
            SnapshotMetric.DRAFT_SECONDS: counts.saved_seconds,
            SnapshotMetric.PREEMPTIONS: counts.preemptions,
            SnapshotMetric.ORDER_PREEMPTIONS: counts.order_preemptions,
            SnapshotMetric.PREFIX_CACHE_HIT_TOKENS: counts.blocks.prefix_hit_tokens,
            **AdapterUse.metrics(self.runner.adapter_uses, info.adapters, info.adapter_bytes),
        }

    def release(self) -> None:
        """Release the weights and the KV caches, and end their process."""
        self.runner.close()

    def log_loaded(self, checkpoint: Checkpoint, config: EngineConfig, seconds: float) -> None:
        info, task = self.runner.info, _task_of(checkpoint)
        _log.info(
            "serving %s in %s on %s, sequences up to %d tokens, %d at a time, steps up to %d tokens;"
            " %d KV blocks of %d tokens, %.1f MB; weights %.1f MB; loaded in %.1f s",
            task,
            info.dtype,
            info.device_name,
            info.max_sequence_tokens,
            config.max_running_sequences,
            info.max_batch_tokens,
            info.num_blocks,
            info.block_size,
            info.num_blocks * info.block_bytes / MEGABYTE,
            info.weight_bytes / MEGABYTE,
            seconds,
        )
        _log_defaults(checkpoint, self.defaults)
        longest = info.max_sequence_tokens
        limits = limit_notes(checkpoint, config, longest)
        log_notes(checkpoint, task, longest, limits, keeps_codes=config.keeps_codes)


def _check_draft_model(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise ConfigError unless a folder has a model that generates with these tokens."""
    try:
        Checkpoint.open(folder).check_task("generate")
    except CheckpointError as error:
        raise ConfigError(f'draft_model is "{folder}": {error}') from error
    own, drafts = (each.huggingface.get_vocab() for each in (tokenizer, Tokenizer(folder, 1)))
    if own != drafts:
        differ = len(own.items() ^ drafts.items())
        raise ConfigError(
            f'draft_model is "{folder}", whose vocabulary differs in {differ} tokens; allowed: a model with the same'
            " tokenizer.json"
        )


def _task_of(checkpoint: Checkpoint) -> Task:
    return "generate" if checkpoint.translate is None else "translate"


def _new_intake(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    config: EngineConfig,
    info: ModelInfo,
    template: ChatTemplate | None,
) -> Intake:
    longest = info.max_sequence_tokens
    limits = InputLimits(
        max_sequence_tokens=longest,
        max_text_bytes=text_limit(config, longest),
        vocab_size=checkpoint.vocab_size,
        type_vocab_size=1,
        can_truncate=False,
    )
    translate = checkpoint.translate
    start = None if translate is None else translate.tokens.start
    return Intake(tokenizer, limits, template, target_start=start, adapters=info.adapters)


def _new_compile_queue(config: EngineConfig, admission: Admission, stats: Stats) -> TokenizerPool:
    """Return the queue of requests that wait for their grammar, whose threads wait for processes."""
    limits = PoolLimits(
        config.max_queued_requests,
        config.max_queued_text_bytes,
        waiting_elsewhere=lambda: admission.depth[0],
    )
    return TokenizerPool(
        limits, stats, threads=MAX_COMPILING, name="grammar", work="its grammar was compiled"
    )


def _new_scheduler(
    config: EngineConfig, info: ModelInfo, admission: Admission, launch_steps: int
) -> IterationScheduler:
    shortest = 0 if config.speculation == "draft_model" else config.prompt_lookup_min
    drafts = config.num_speculative_tokens, shortest
    limits = StepLimits(
        max_step_tokens=info.max_batch_tokens,
        inter_token_latency_seconds=config.inter_token_latency_ms / 1000,
        max_running_sequences=config.max_running_sequences,
        max_sequence_tokens=info.max_sequence_tokens,
        short_slots=config.short_slots,
        short_tokens=SHORT_TOKENS,
        stages=config.pipeline_parallel,
        launch_steps=launch_steps,
        speculation=None if config.speculation == "none" else Speculation(*drafts),
    )
    blocks = BlockPool(info.num_blocks, info.block_size, prefix_cache=config.prefix_cache)
    return IterationScheduler(limits, blocks, config.kv_policy, admission)


def _log_defaults(checkpoint: Checkpoint, defaults: RequestDefaults) -> None:
    """Say which sampling options requests get that do not send them."""
    if checkpoint.translate is not None:
        return
    options = [f"{name} {value:g}" for name, value in defaults.options.items()]
    if defaults.max_new_tokens is not None:
        options.append(f"max_tokens up to {defaults.max_new_tokens}")
    if options:
        _log.info(
            "defaults of generation_config.json: %s; generation_config: none leaves them out",
            ", ".join(options),
        )

"""A model of one step: workers, input checks, engine and response cache."""

import logging
import math
import time
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from varlen.cache.response_cache import CacheUse, JoinLimits, ResponseCache
from varlen.config import NO_LIMIT, EngineConfig
from varlen.decoding.text.chat import ChatPairTemplate, ChatTemplate, FormPairTemplate
from varlen.errors import CheckpointError
from varlen.execution.executor import ModelExecutor
from varlen.execution.model_info import ModelInfo, limit_notes, queue_limit, text_limit
from varlen.execution.workers.worker import Workers, load_workers
from varlen.intake.checks import Intake, PairTemplate
from varlen.intake.found import ApartLabelTokens, WordPrompts
from varlen.intake.long_texts import MAX_WINDOWED_BYTES, InputLimits, LongTextRules
from varlen.intake.roles import mask_token, roles_of
from varlen.intake.tokenization import Tokenized, Tokenizer
from varlen.memory.memory_use import AdapterUse
from varlen.models.checkpoint.extraction import LABELS_TOKENIZER
from varlen.models.checkpoint.sentence_transformers import ROUTER_TABLE
from varlen.models.checkpoint.vector_layers import DenseConfig, pools_spans
from varlen.models.checkpoint.weights import CheckpointWeights
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Float32Array, Prompt, Reply, Request, Terms
from varlen.request.vectors import terms_in_order
from varlen.scheduling.admission import Admission
from varlen.scheduling.engine import Engine
from varlen.scheduling.one_shot.one_shot import OneShotScheduler
from varlen.service.costs import costs_for, warm_up
from varlen.service.service import MEGABYTE, Service, log_notes, template_sandbox
from varlen.tasks import Task
from varlen.telemetry.metrics import MetricsSnapshot, SnapshotMetric, Stats

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TermLookup:
    """Stored weights of tokens: the sparse vectors of queries that are looked up.

    No model runs, so they pass the queue, the batches and the response cache. Source:
    sparse_encoder/modules/sparse_static_embedding.py of sentence-transformers.

    Attributes:
        weights: `[terms]` fp32, the weight of each token.
    """

    weights: Float32Array

    @classmethod
    def of(cls, checkpoint: Checkpoint, task: Task) -> "TermLookup | None":
        router = checkpoint.router
        if router is None or task != "sparse_embed":
            return None
        with CheckpointWeights(checkpoint.folder / router.queries) as weights:
            # a view would keep the file mapped
            return cls(weights.read(ROUTER_TABLE, checkpoint.vocab_size).float().clone().numpy())

    @staticmethod
    def answers(request: Request) -> bool:
        """Return whether the rows of a request are looked up; they have one role."""
        return type(request.prompts[0].payload) is Terms

    def answer(self, request: Request, reply: Reply) -> None:
        for row, prompt in enumerate(request.prompts):
            reply.send(row, self.terms(prompt))
        reply.finish()

    def terms(self, prompt: Prompt) -> Float32Array:
        """Return the terms of a text, the largest weight first, `[terms, 2]` fp32.

        Terms of weight 0 are left out.
        """
        terms = np.unique(prompt.token_ids)
        weights = self.weights[terms]
        is_kept = weights != 0
        return terms_in_order(terms[is_kept], weights[is_kept])


@dataclass(frozen=True, slots=True)
class EncoderParts:
    """A model of one step: a `Kind`.

    Its response cache, if it is on, is in front of the engine; queries that are looked up reach neither.
    """

    workers: Workers
    info: ModelInfo
    engine: Engine
    cache: ResponseCache | None
    lookup: TermLookup | None = None

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
    ) -> "Service[EncoderParts]":
        workers = load_workers(checkpoint, config, stats, gpu=gpu, isolated=isolated)
        executor = workers.new_executor()
        opened.callback(_close, executor, workers)
        info = workers.info
        most, late = info.max_sequence_tokens, checkpoint.late
        tokenizer = Tokenizer(
            checkpoint.weights_folder,
            most,
            has_types=checkpoint.has_token_types,
            adds_special_tokens=checkpoint.adds_special_tokens,
            side=checkpoint.truncation_side,
            prefixes=() if late is None else late.prefixes,
        )
        sandbox, template = template_sandbox(checkpoint, config, max_characters=NO_LIMIT)
        opened.callback(sandbox.close)
        limits = _input_limits(config, info)
        filled: int | None = None
        if info.task == "fill_mask":
            filled = mask_token(checkpoint, tokenizer, needed_by="the task fill_mask")
        intake = Intake(
            tokenizer,
            limits,
            roles=roles_of(checkpoint, info.task, tokenizer, most),
            mask_token=filled,
            pair_template=_pair_template(checkpoint, tokenizer, info.task, template),
            word_prompts=_word_prompts(checkpoint, tokenizer, limits),
            pair_prefixes=checkpoint.pair_prefixes,
            adapters=info.adapters,
            long_texts=_long_text_rules(checkpoint, config, info),
        )
        warm_up(info, executor, config)
        costs = costs_for(info, executor, checkpoint, config)
        workers.use_all_cores()
        # a GPU runs one batch at a time, whatever is in flight
        admission = Admission(
            config.max_queued_requests, queue_limit(config, most), slots=info.workers
        )
        scheduler = OneShotScheduler(config, costs, admission, info.max_batch_tokens)
        engine = Engine(scheduler, executor, stats, is_padded=info.is_padded)
        lookup = TermLookup.of(checkpoint, info.task)
        model = cls(workers, info, engine, _response_cache(config, engine, info), lookup)
        return Service(checkpoint, info.task, intake, admission, engine, executor, sandbox, model)

    def submit(self, request: Request, reply: Reply) -> None:
        # an answer from elsewhere would hide that the model does not run
        is_probe = request.options.probe
        if request.options.adapter:
            self.info.check_adapter(request.options.adapter)
        if self.lookup is not None and not is_probe and self.lookup.answers(request):
            self.lookup.answer(request, reply)
            return
        cache = None if is_probe else self.cache
        (cache or self.engine).submit(request, reply)

    def metrics(self) -> MetricsSnapshot:
        info, cache = self.info, self.cache.use() if self.cache else CacheUse()
        return {
            SnapshotMetric.WEIGHT_BYTES: info.weight_bytes,
            SnapshotMetric.ARENA_CAPACITY: info.workers * info.arena_bytes,
            **self.workers.use().metrics(),
            **self.workers.graphs.metrics(),
            SnapshotMetric.CACHE_BYTES: cache.held_bytes,
            SnapshotMetric.CACHE_ENTRIES: cache.entries,
            SnapshotMetric.CACHE_HITS: cache.hits,
            SnapshotMetric.CACHE_JOINED: cache.joined,
            SnapshotMetric.CACHE_MISSES: cache.misses,
            SnapshotMetric.CACHE_EVICTIONS: cache.evictions,
            **AdapterUse.metrics(self.workers.adapter_uses, info.adapters, info.adapter_bytes),
        }

    def release(self) -> None:
        self.workers.close()

    def log_loaded(self, checkpoint: Checkpoint, config: EngineConfig, seconds: float) -> None:
        info = self.info
        _log.info(
            "serving %s in %s on %s; workers: %d; sequences up to %d tokens, batches of several up to %d;"
            " arena up to %.1f MB a worker, weights %.1f MB; loaded in %.1f s",
            info.task,
            info.dtype,
            info.device_name,
            info.workers,
            min(info.max_sequence_tokens, info.max_arena_tokens),
            info.max_batch_tokens,
            info.arena_bytes / MEGABYTE,
            info.weight_bytes / MEGABYTE,
            seconds,
        )
        longest = info.max_sequence_tokens
        limits = limit_notes(checkpoint, config, longest, info.max_arena_tokens)
        log_notes(checkpoint, info.task, longest, limits, keeps_codes=config.keeps_codes)


def _close(executor: ModelExecutor, workers: Workers) -> None:
    """Stop an executor without an engine; release its workers, unless their device hangs."""
    if executor.close():
        workers.close()


def _response_cache(config: EngineConfig, engine: Engine, info: ModelInfo) -> ResponseCache | None:
    if not config.response_cache_bytes:
        return None
    joins = JoinLimits(
        max_flight_tokens=info.max_batch_tokens,
        max_requests=config.max_queued_requests,
        max_tokens=queue_limit(config, info.max_sequence_tokens),
    )
    return ResponseCache(
        engine.submit,
        joins,
        time.monotonic,
        max_bytes=config.response_cache_bytes,
        max_seconds=config.response_cache_seconds or math.inf,
    )


def _word_prompts(
    checkpoint: Checkpoint, tokenizer: Tokenizer, limits: InputLimits
) -> WordPrompts | None:
    config = checkpoint.extraction
    if config is None:
        return None
    labels = None
    if config.labels is not None:
        folder = checkpoint.weights_folder / LABELS_TOKENIZER
        labels = ApartLabelTokens(Tokenizer(folder, config.labels.longest), config.labels, limits)
    return WordPrompts(tokenizer, config, limits, labels)


def _input_limits(config: EngineConfig, info: ModelInfo) -> InputLimits:
    return InputLimits(
        max_sequence_tokens=info.max_sequence_tokens,
        max_text_bytes=text_limit(config, info.max_sequence_tokens),
        vocab_size=info.vocab_size,
        type_vocab_size=info.type_vocab_size,
        max_arena_tokens=info.max_arena_tokens,
    )


def _long_text_rules(
    checkpoint: Checkpoint, config: EngineConfig, info: ModelInfo
) -> LongTextRules:
    no_spans, behind = "", ""
    if not pools_spans(checkpoint.pooling):
        found = " and ".join(checkpoint.pooling)
        no_spans = f"pools by {found}: a vector of a span is the mean of its tokens"
    elif info.device != "cpu":
        no_spans = "runs on a GPU, which has one vector for each text (a CPU has others)"
    for layer in checkpoint.vector_layers("embed"):
        if not isinstance(layer, DenseConfig) or layer.activation != "identity":
            behind = layer.shown
    if checkpoint.rounds:
        behind = "rounding"
    # a setting holds for windows too
    return LongTextRules(config.max_text_bytes or MAX_WINDOWED_BYTES, no_spans, behind)


def _pair_template(
    checkpoint: Checkpoint, tokenizer: Tokenizer, task: Task, template: ChatTemplate | None
) -> PairTemplate | None:
    score = checkpoint.logit_score
    if score is None or task != "rerank":
        return None

    def tokenize(text: str) -> Tokenized:
        (found,) = tokenizer.encode([text], truncate=False, special_tokens=False)
        return found

    if score.form is not None:
        return FormPairTemplate(score.form, tokenize)
    if template is None:
        raise CheckpointError("the checkpoint has no chat template, which pairs of texts need")
    template.check()
    return ChatPairTemplate(template, score, tokenize)
